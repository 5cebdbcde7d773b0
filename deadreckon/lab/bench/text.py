"""`deadreckon bench text`: tokens a second of training steps of whole language models, beside Hugging Face's Llama."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import deadreckon as dr
from deadreckon.lab.arguments import names_in, sizes_in
from deadreckon.lab.bench.flags import Mode, Text
from deadreckon.lab.bench.page import Page, Row, explain, ratio
from deadreckon.lab.bench.timing import empty_cache, peak_bytes, repeated, seconds
from deadreckon.lab.recipes import check_encodings

LLAMA = "Hugging Face Llama"
RECOMPUTE = " with recompute"  # behind an encoding's name
SIZES = {"cpu": ("2x128",), "cuda": ("24x1024", "16x2048")}
BATCHES = {"cpu": "2x256", "cuda": "8x4096"}
MODES: dict[str, tuple[Mode, ...]] = {"cpu": ("eager",), "cuda": ("eager", "compiled")}
HEADINGS = ["layers x width", "", "parameters", "first step", "step", "tokens/s", "×", "peak memory"]


def make_model(
    name: str, layers: int, width: int, vocab: int, longest: int, device: str, group: int = 1, head_dim: int = 64
) -> PreTrainedModel:
    """Llama, or ours with an encoding: the same sizes; `group` query heads share one of keys, if there are as many."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": max(width // head_dim, 1), "max_position_embeddings": longest,
        "num_key_value_heads": max(width // head_dim // group, 1),
    }  # fmt: skip
    encoding = "rope" if name == LLAMA else name.removesuffix(RECOMPUTE)
    options = {encoding: {"recompute": True}} if name.endswith(RECOMPUTE) else None
    config = dr.DeadReckonConfig(encoding=encoding, encoding_options=options, **sizes, use_cache=False)
    with torch.device(device):
        if name != LLAMA:
            return dr.DeadReckonForCausalLM(config)
        sizes["intermediate_size"] = config.intermediate_size
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa", use_cache=False))


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
    names = names_in([flags.encodings])
    check_encodings(names)
    if flags.recompute:
        names += tuple(name + RECOMPUTE for name in names if "recompute" in signature(dr.ENCODINGS[name]).parameters)
    batch, length = sizes_in(flags.batch or BATCHES[device], "batch", "BxT, such as 8x4096")
    sizes = [sizes_in(size, "sizes", "LxW, such as 24x1024") for size in flags.sizes or SIZES[device]]
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(0, flags.vocab, (batch, length), generator=generator, device=device)
    page.note(
        f"{batch} x {length} tokens a step, heads of {flags.head_dim}, vocabulary of {flags.vocab}",
        f"× is the speed over {LLAMA}'s, eager",
    )

    def rows() -> Iterator[Row]:
        bases = dict[str, float]()  # by size
        for (layers, width), mode, name in product(sizes, flags.modes or MODES[device], (LLAMA, *names)):
            size, title = f"{layers}x{width}", f"{name}, {mode}"
            torch.compiler.reset()
            make = partial(make_model, name, layers, width, flags.vocab, length, device, head_dim=flags.head_dim)
            try:
                (*cells, memory), speed = measure(make, tokens, mode == "compiled", flags.rounds)
            except Exception as error:
                yield [size, f"{title} ({explain(error)})", *[""] * (len(HEADINGS) - 2)]
            else:
                bases |= {size: speed} if (name, mode) == (LLAMA, "eager") else {}
                yield [size, title, *cells, ratio(speed, bases.get(size, 0.0)), memory]
            gc.collect()  # a model and its optimizer are in circles
            empty_cache(device)

    page.table(HEADINGS, rows(), left=2)
