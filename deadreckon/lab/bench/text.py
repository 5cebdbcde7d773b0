"""Benchmarks of whole language models against Hugging Face's Llama.

`deadreckon bench text` times training steps, `deadreckon bench decode --encodings …` times `generate()`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedModel

import deadreckon as dr
from deadreckon.lab.arguments import check_counts, names_in, sizes_in
from deadreckon.lab.bench.flags import Decode, Mode, Text
from deadreckon.lab.bench.page import PARTS, Page, Row, explain, milliseconds, parts_of, ratio
from deadreckon.lab.bench.timing import SUMMARIES, empty_cache, host_seconds, peak_bytes, repeated, seconds, summary
from deadreckon.lab.recipes import check_encodings

LLAMA = "Hugging Face Llama"
RECOMPUTE = " with recompute"  # behind an encoding's name
SIZES = {"cpu": ("2x128",), "cuda": ("24x1024", "16x2048")}
BATCHES = {"cpu": "2x256", "cuda": "8x4096"}
MODES: dict[str, tuple[Mode, ...]] = {"cpu": ("eager",), "cuda": ("eager", "compiled")}
GENERATED = {"cpu": "2x128", "cuda": "16x2048"}  # sizes of models that generate
PROMPTS = {"cpu": ("1x128",), "cuda": ("1x512", "1x16384", "16x2048")}
GENERATIONS = 5  # that are timed
ISSUED = 3  # steps whose issue by the host is timed
GROUP = 4  # query heads a key head, of these
VOCABULARY = 32000
HEADINGS = ["layers x width", "", "parameters", "first step", "step", "tokens/s", "×", "peak memory"]


def make_model(
    name: str, layers: int, width: int, vocab: int, longest: int, device: str, group: int = 1, head_dim: int = 64,
    qk_norm: bool = False, power: int = 2,
) -> PreTrainedModel:  # fmt: skip
    """Llama, or our model with an encoding, of the same sizes. `group` query heads share a key head (GQA).

    With fewer heads there is one key head. `qk_norm` is for our models only; `power` is p of encodings that have one.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": max(width // head_dim, 1), "max_position_embeddings": longest,
        "num_key_value_heads": max(width // head_dim // group, 1),
    }  # fmt: skip
    encoding = "rope" if name == LLAMA else name.removesuffix(RECOMPUTE)
    options: dict[str, Any] | None = {encoding: {"recompute": True}} if name.endswith(RECOMPUTE) else None
    if "p" in signature(dr.ENCODINGS[encoding]).parameters:
        options = {encoding: {"p": power}}
    config = dr.DeadReckonConfig(encoding=encoding, encoding_options=options, **sizes, qk_norm=qk_norm, use_cache=False)
    with torch.device(device):
        if name != LLAMA:
            return dr.DeadReckonForCausalLM(config)
        sizes["intermediate_size"] = config.intermediate_size
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False))


def training_step(model: torch.nn.Module, tokens: Tensor, compiled: bool) -> Callable[[], Tensor]:
    """A function that takes a training step and returns its loss. The first call raises unless there are gradients."""
    device = tokens.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    forward = torch.compile(model) if compiled else model
    options = {"skip_logits": True} if isinstance(model, dr.DeadReckonForCausalLM) else {}  # as `train` does
    norms: list[float] = []

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(input_ids=tokens, labels=tokens, **options).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not norms:
            norms.append(float(norm))
            if not 0 < norms[0] < math.inf:
                raise RuntimeError(f"expected gradients with a norm above 0, got {norms[0]}")
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Steps(NamedTuple):
    """Timings of training steps of one model."""

    cells: Row  # of its row, without the ratio
    speed: float  # tokens a second
    step: Callable[[], Tensor]  # one more


def measure(make: Callable[[], torch.nn.Module], tokens: Tensor, compiled: bool, rounds: int) -> Steps:
    """Times training steps of one model."""
    device = tokens.device.type
    model = make()
    step = training_step(model, tokens, compiled)
    first = seconds(step, device)
    time = repeated(step, rounds, device)
    memory = f"{(torch.cuda.memory_allocated() + peak_bytes(step, device)) / 2**30:.1f} GiB" if device == "cuda" else ""
    count = sum(x.numel() for x in model.parameters())
    speed = tokens.numel() / time
    cells = [f"{count / 1e6:.0f} M", f"{first:.1f} s", f"{1e3 * time:.1f} ms", f"{speed:,.0f}", memory]
    return Steps(cells, speed, step)


def profile(step: Callable[[], Tensor], device: str) -> list[Row]:
    """Profiles a training step; on a GPU also the host time to launch it."""
    try:
        parts = parts_of(step, device)
        if device == "cuda":
            host = median(host_seconds(step, device) for _ in range(ISSUED))
            parts.append(["issued by the host in", milliseconds(host), "", ""])
    except Exception as error:  # what was timed is worth more
        return [[explain(error), "", "", ""]]
    return parts


def run(flags: Text) -> None:
    """Times Llama, then our models; speeds are compared with Llama in eager mode."""
    device, page = flags.device, Page(flags, "Training steps", ("triton", "transformers"))
    names = names_in([flags.encodings])
    check_encodings(names)
    if flags.recompute:
        names += tuple(name + RECOMPUTE for name in names if "recompute" in signature(dr.ENCODINGS[name]).parameters)
    batch, length = sizes_in(flags.batch or BATCHES[device], "batch", "BxT, such as 8x4096")
    sizes = [sizes_in(size, "sizes", "LxW, such as 24x1024") for size in flags.sizes or SIZES[device]]
    check_counts(head_dim=flags.head_dim, vocab=flags.vocab)
    if uneven := [width for _, width in sizes if width > flags.head_dim and width % flags.head_dim]:
        raise ValueError(f"head_dim: expected a divisor of the width {uneven[0]}, got {flags.head_dim}")
    heads = " and ".join(dict.fromkeys(str(min(width, flags.head_dim)) for _, width in sizes))
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, flags.vocab, (batch, length), generator=generator, device=device)
    page.note(
        f"{batch} x {length} tokens a step, heads of {heads}, vocabulary of {flags.vocab}",
        *["QK-norm in ours"] * flags.qk_norm,
        f"× is the speed over {LLAMA}'s, eager",
    )

    profiles = dict[str, list[Row]]()  # by title

    def rows() -> Iterator[Row]:
        bases = dict[str, float]()  # tokens a second, by size
        for (layers, width), mode, name in product(sizes, flags.modes or MODES[device], (LLAMA, *names)):
            size, title = f"{layers}x{width}", f"{name}, {mode}"
            torch.compiler.reset()
            make = partial(
                make_model, name, layers, width, flags.vocab, length, device,
                head_dim=flags.head_dim, qk_norm=flags.qk_norm,
            )  # fmt: skip
            try:
                steps = measure(make, tokens, mode == "compiled", flags.rounds)
            except Exception as error:
                yield [size, f"{title} ({explain(error)})", *[""] * (len(HEADINGS) - 2)]
            else:
                bases |= {size: steps.speed} if (name, mode) == (LLAMA, "eager") else {}
                *cells, memory = steps.cells
                yield [size, title, *cells, ratio(steps.speed, bases.get(size, 0.0)), memory]
                if flags.profile and name != LLAMA:
                    profiles[f"{size}, {title}: a step"] = profile(steps.step, device)
                del steps
            gc.collect()  # a model and its optimizer are in circles
            empty_cache(device)

    page.table(HEADINGS, rows(), left=2)
    for title, parts in profiles.items():
        page.table(PARTS, parts, title)


class FirstToken(LogitsProcessor):
    """Records when prefill ends; leaves logits unchanged."""

    def __init__(self) -> None:
        self.time: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.time is None:
            scores[0, 0].item()  # waits for a GPU
            self.time = time.perf_counter()
        return scores


def generate(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Seconds per greedily decoded token, and of prefill; from one run, since prefill varies by what tokens take."""
    first, began = FirstToken(), time.perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1 + tokens, min_new_tokens=1 + tokens,
        do_sample=False, use_cache=True, pad_token_id=0, logits_processor=[first],
    ).cpu()  # fmt: skip
    ended = time.perf_counter()  # .cpu() has waited for a GPU
    assert first.time is not None
    return (ended - first.time) / tokens, first.time - began


def measure_generation(model: PreTrainedModel, prompt: Tensor, tokens: int) -> tuple[float, float]:
    """Summarises several runs, after one that compiles everything."""
    generate(model, prompt, 2)
    token, first = zip(*(generate(model, prompt, tokens) for _ in range(GENERATIONS)), strict=True)
    return summary(list(token), prompt.device.type), summary(list(first), prompt.device.type)


def run_models(flags: Decode) -> None:
    """Times `generate()` of Llama, then of our models."""
    device, page = flags.device, Page(flags, "Generation", ("triton", "transformers"))
    layers, width = sizes_in(flags.size or GENERATED[device], "size", "LxW, such as 16x2048")
    prompts = [sizes_in(prompt, "prompts", "BxT, such as 1x512") for prompt in flags.prompts or PROMPTS[device]]
    check_counts(tokens=flags.tokens)
    encodings = names_in([flags.encodings])
    check_encodings(encodings)
    longest = max(length for _, length in prompts) + flags.tokens + 1
    for name in (LLAMA, *encodings):  # which says what cannot be before anything is timed
        make_model(name, layers, width, VOCABULARY, longest, "meta", GROUP, power=flags.power)
    page.note(
        f"{layers} layers of {width}, {GROUP} query heads a key head", f"greedy, {flags.tokens} tokens",
        f"{SUMMARIES[device][0]} of {GENERATIONS}", *([] if flags.power == 2 else [f"powers of {flags.power}"]),
    )  # fmt: skip

    def rows() -> Iterator[Row]:
        for name in (LLAMA, *encodings):
            model = make_model(name, layers, width, VOCABULARY, longest, device, GROUP, power=flags.power).eval()
            if device == "cuda":
                model = model.to(torch.bfloat16)
            row = [name]
            for batch, length in prompts:
                torch.manual_seed(0)
                prompt = torch.randint(1, VOCABULARY, (batch, length), device=device)
                try:
                    token, first = measure_generation(model, prompt, flags.tokens)
                except RuntimeError as error:  # a table is worth more than a line of it
                    row += [explain(error), ""]
                    continue
                row += [f"{1e3 * token:.2f} ms", f"{first:.3f} s"]
            yield row
            del model
            gc.collect()

    headings = [cell for batch, length in prompts for cell in (f"{batch} x {length}, a token", "prefill")]
    page.table(["", *headings], rows())
