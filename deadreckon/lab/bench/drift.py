"""`deadreckon bench drift`: numerical drift of decoding in bfloat16, and of keys that are rewritten in place."""

from __future__ import annotations

import time

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import normalize
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.lab.bench.cases import relative_error
from deadreckon.lab.bench.flags import Drift
from deadreckon.lab.bench.page import Page, Row, ratio


@torch.no_grad()
def model_drift(length: int, last: int, device: str) -> tuple[float, float]:
    """Errors of the last logits against float64: of one forward pass in bfloat16, and of token-by-token decoding."""
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding="path", vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    model = dr.DeadReckonForCausalLM(config).bfloat16().to(device).eval()
    exact = dr.DeadReckonForCausalLM(config).double().to(device).eval()
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    truth = exact(tokens, logits_to_keep=last).logits
    once = model(tokens, logits_to_keep=last).logits
    cache, logits = DynamicCache(config=config), []
    for token in track(tokens[0].split(1), "logits, token by token", transient=True):
        logits.append(model(token.unsqueeze(0), past_key_values=cache).logits[:, -1])
    return relative_error(once, truth), relative_error(torch.stack(logits[-last:], dim=1), truth)


@torch.no_grad()
def in_place_drift(length: int, last: int, device: str) -> tuple[float, float]:
    """Errors of attention logits: with keys rounded to bfloat16 once, and with keys rounded at every step, in place."""
    generator = torch.Generator().manual_seed(2)
    heads, width = 2, 64

    def draw() -> Tensor:
        return torch.randn(heads, length, width, generator=generator).to(device)

    q, k = (draw().bfloat16() for _ in range(2))
    w, beta = normalize(draw(), dim=-1), 2 * torch.rand(heads, length, 1, generator=generator).to(device)
    exact, kept = k.double(), k.clone()
    truth, rounded, in_place = list[Tensor](), list[Tensor](), list[Tensor]()
    for i in track(range(length), "the rule in place", transient=True):
        step = w[:, i : i + 1]
        for keys, dtype in ((exact, torch.float64), (kept, torch.float32)):
            past, along = keys[:, :i].to(dtype), step.to(dtype)
            keys[:, :i] = past - beta[:, i : i + 1].to(dtype) * (past @ along.mT) * along
        if i >= length - last:
            query = q[:, i].double().unsqueeze(-1)
            for into, keys in ((truth, exact), (rounded, exact.bfloat16()), (in_place, kept)):
                into.append((keys[:, : i + 1].double() @ query).flatten())
    logits = torch.cat(truth)
    return relative_error(torch.cat(rounded), logits), relative_error(torch.cat(in_place), logits)


def run(flags: Drift) -> list[Row]:
    """Measures both kinds of drift; a ratio compares with the row above."""
    if flags.last > flags.length:
        raise ValueError(f"last: expected at most length = {flags.length}, got {flags.last}")
    page, began = Page(flags, "Drift of decoding"), time.perf_counter()
    page.note(f"PaTH, {flags.length} tokens in bfloat16; relative errors of the last {flags.last} against float64")
    sizes = (flags.length, flags.last, flags.device)
    errors = [*model_drift(*sizes), *in_place_drift(*sizes)]
    names = ["model's logits, one forward pass", "model's logits, token by token"]
    names += ["attention's logits, keys rounded once", "attention's logits, keys rewritten in place"]
    rows = [[name, f"{error:.2e}", ""] for name, error in zip(names, errors, strict=True)]
    for place in (1, 3):
        rows[place][2] = ratio(errors[place], errors[place - 1])
    page.table(["", "error", "×"], rows)
    page.say(f"In {time.perf_counter() - began:.0f} s.")
    return rows
