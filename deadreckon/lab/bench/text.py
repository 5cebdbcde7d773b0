"""`deadreckon bench text`: tokens a second of training steps of whole language models, beside Hugging Face's Llama."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import deadreckon as dr
from deadreckon.lab.bench.flags import Mode, Text
from deadreckon.lab.bench.page import Page, Row, explain, ratio, sizes_in
from deadreckon.lab.bench.timing import peak_bytes, repeated, seconds

LLAMA = "Hugging Face Llama"
HEAD_DIM = 64
SIZES = {"cpu": ("2x128",), "cuda": ("24x1024", "16x2048")}
BATCHES = {"cpu": "2x256", "cuda": "8x4096"}
MODES: dict[str, tuple[Mode, ...]] = {"cpu": ("eager",), "cuda": ("eager", "compiled")}
HEADINGS = ["layers x width", "", "parameters", "first step", "step", "tokens/s", "×", "peak memory"]


def make_model(
    name: str, layers: int, width: int, vocab: int, longest: int, device: str, group: int = 1
) -> PreTrainedModel:
    """Llama, or ours with an encoding: the same sizes; `group` query heads share one of keys, if there are as many."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": max(width // HEAD_DIM, 1), "max_position_embeddings": longest,
        "num_key_value_heads": max(width // HEAD_DIM // group, 1),
    }  # fmt: skip
    config = dr.DeadReckonConfig(encoding="rope" if name == LLAMA else name, **sizes, use_cache=False)
    with torch.device(device):
        if name != LLAMA:
            return dr.DeadReckonForCausalLM(config)
        sizes["intermediate_size"] = config.intermediate_size
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False))


def encodings_in(text: str) -> list[str]:
    """Names of encodings, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    strangers = [name for name in names if name not in dr.ENCODINGS]
    if strangers:
        raise ValueError(f"encodings: expected names among {', '.join(dr.ENCODINGS)}; got {', '.join(strangers)}")
    return names


def training_step(model: torch.nn.Module, tokens: Tensor, compiled: bool) -> Callable[[], None]:
    """From tokens to changed weights."""
    device = tokens.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(make: Callable[[], torch.nn.Module], tokens: Tensor, compiled: bool, rounds: int) -> tuple[Row, float]:
    """The cells of a row but the ratio, and tokens a second."""
    device = tokens.device.type
    model = make()
    step = training_step(model, tokens, compiled)
    first = seconds(step, device)
    time = repeated(step, rounds, device)
    memory = f"{(torch.cuda.memory_allocated() + peak_bytes(step, device)) / 2**30:.1f} GiB" if device == "cuda" else ""
    count = sum(x.numel() for x in model.parameters())
    speed = tokens.numel() / time
    return [f"{count / 1e6:.0f} M", f"{first:.1f} s", f"{1e3 * time:.1f} ms", f"{speed:,.0f}", memory], speed


def run(flags: Text) -> None:
    """Llama first: what speeds are compared with is its eager one."""
    device, page = flags.device, Page(flags, "Training steps", ("triton", "transformers"))
    names = encodings_in(flags.encodings)
    batch, length = sizes_in(flags.batch or BATCHES[device], "batch", "BxT, such as 8x4096")
    sizes = [sizes_in(size, "sizes", "LxW, such as 24x1024") for size in flags.sizes or SIZES[device]]
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, flags.vocab, (batch, length), generator=generator, device=device)
    page.note(f"{batch} x {length} tokens a step, vocabulary of {flags.vocab}", f"× is the speed over {LLAMA}'s, eager")

    def rows() -> Iterator[Row]:
        for layers, width in sizes:
            base = 0.0
            for mode in flags.modes or MODES[device]:
                for name in (LLAMA, *names):
                    title = [f"{layers}x{width}", f"{name}, {mode}"]
                    torch.compiler.reset()
                    make = partial(make_model, name, layers, width, flags.vocab, length, device)
                    try:
                        (*cells, memory), speed = measure(make, tokens, mode == "compiled", flags.rounds)
                    except Exception as error:
                        yield [title[0], f"{title[1]} ({explain(error)})", *[""] * (len(HEADINGS) - 2)]
                    else:
                        base = speed if (name, mode) == (LLAMA, "eager") else base
                        yield [*title, *cells, ratio(speed, base), memory]
                    gc.collect()  # a model and its optimizer are in circles
                    if device == "cuda":
                        torch.cuda.empty_cache()

    page.table(HEADINGS, rows(), left=2)
