"""`deadreckon bench decode --encodings ...`: milliseconds a token of `generate()`, beside Hugging Face's Llama."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deadreckon.lab.arguments import check_counts, names_in, sizes_in
from deadreckon.lab.bench.flags import Decode
from deadreckon.lab.bench.page import Page, Row, explain
from deadreckon.lab.bench.text import LLAMA, make_model
from deadreckon.lab.recipes import check_encodings

SIZES = {"cpu": "2x128", "cuda": "16x2048"}
PROMPTS = {"cpu": ("1x128",), "cuda": ("1x512", "1x16384", "16x2048")}
GROUP = 4  # query heads a key head
VOCABULARY = 32000


def generate(model: PreTrainedModel, prompt: Tensor, tokens: int) -> float:
    """Seconds that so many tokens take, greedily, with what comes before them."""
    if prompt.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, use_cache=True, pad_token_id=0,
    )  # fmt: skip
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Seconds of one more token, and of the prompt with the first, when everything is compiled: the better of two."""
    generate(model, prompt, 3)
    first = min(generate(model, prompt, 1) for _ in range(2))
    return (min(generate(model, prompt, 1 + tokens) for _ in range(2)) - first) / tokens, first


def run_models(flags: Decode) -> None:
    """Llama first, then ours."""
    device, page = flags.device, Page(flags, "Generation", ("triton", "transformers"))
    layers, width = sizes_in(flags.size or SIZES[device], "size", "LxW, such as 16x2048")
    prompts = [sizes_in(prompt, "prompts", "BxT, such as 1x512") for prompt in flags.prompts or PROMPTS[device]]
    check_counts(tokens=flags.tokens)
    encodings = names_in([flags.encodings])
    check_encodings(encodings)
    longest = max(length for _, length in prompts) + flags.tokens + 1
    page.note(f"{layers} layers of {width}, {GROUP} query heads a key head", f"greedy, {flags.tokens} tokens")

    def rows() -> Iterator[Row]:
        for name in (LLAMA, *encodings):
            model = make_model(name, layers, width, VOCABULARY, longest, device, GROUP).eval()
            if device == "cuda":
                model = model.to(torch.bfloat16)
            row = [name]
            for batch, length in prompts:
                torch.manual_seed(0)
                prompt = torch.randint(1, VOCABULARY, (batch, length), device=device)
                try:
                    token, first = measure(model, prompt, flags.tokens)
                except RuntimeError as error:  # a table is worth more than a line of it
                    row += [explain(error), ""]
                    continue
                row += [f"{1e3 * token:.2f} ms", f"{first:.3f} s"]
            yield row
            del model
            gc.collect()

    headings = [cell for batch, length in prompts for cell in (f"{batch} x {length}, a token", "prefill")]
    page.table(["", *headings], rows())
