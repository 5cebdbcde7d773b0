"""PRISM's program counter made visible: what a trained model's cursors do on one question and its answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.tasks import task


class Trace(NamedTuple):
    """One head on one sequence of T tokens, and one of its pairs of cursors."""

    words: list[str]
    asked: int  # how many of them are the question
    layer: int
    head: int
    cursor: int
    gates: dict[str, Tensor]  # (T, 4) of the pair's query and key cursor: reset, +1, −1, stay
    modes: dict[str, Tensor]  # (T, C) of all of the head's
    histograms: dict[str, Tensor]  # (T, P) of the pair's
    attention: Tensor  # (T, T)
    mix: float
    alpha: Tensor  # (C,)


def words(tokens: Tensor) -> list[str]:
    """Each token of a row for people; ? for those that the alphabet lacks, which a model may say all the same."""
    return [task.ALPHABET[token] if token < len(task.ALPHABET) else "?" for token in tokens.tolist()]


def answer(model: dr.DeadReckonForCausalLM, question: str) -> tuple[Tensor, int]:
    """Tokens (1, T) of a question, = and what the model says to it, and how many of them it was asked."""
    asked = task.encode(question if question.endswith("=") else question + "=").to(model.device)
    room = 4 * asked.shape[1] + 20
    said = model.generate(asked, max_new_tokens=room, do_sample=False, eos_token_id=task.END, pad_token_id=task.PAD)
    return said, asked.shape[1]


def layers_of(model: dr.DeadReckonForCausalLM) -> list[Any]:
    """Its attention layers, all of which have cursors."""
    layers: list[Any] = [part.self_attn for part in model.model.layers]
    if not all(hasattr(part.encoding, "cursors") for part in layers):
        raise ValueError(f"model: expected one with the encoding prism, got {model.config.encodings()}")
    return layers


@torch.no_grad()
def trace(
    model: dr.DeadReckonForCausalLM,
    tokens: Tensor,
    asked: int,
    layer: int | None = None,
    head: int | None = None,
    cursor: int | None = None,
) -> Trace:
    """Runs tokens (1, T) and reads one head; by default that to whose logits position adds most."""
    model.eval()
    layers = layers_of(model)
    layer, head, cursor = _choose(layers, layer, head, cursor)
    attention = layers[layer]
    owner = layers[attention.encoding.source]
    caught: dict[str, Any] = {}
    hooks = [
        owner.encoding.cursors.register_forward_pre_hook(lambda _, given: caught.update(before=given)),
        attention.q_proj.register_forward_pre_hook(lambda _, given: caught.update(x=given[0])),
        attention.q_norm.register_forward_hook(lambda _, given, found: caught.update(q=found)),
        attention.k_norm.register_forward_hook(lambda _, given, found: caught.update(k=found)),
    ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    x, context, _ = caught["before"]
    reading = owner.encoding.cursors.read(x, context)
    q, k = attention.encoding.widen(caught["q"], caught["k"], caught["x"], context)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = (q[0, :, head] @ k[0, :, head].T) * attention.sizes.head_dim**-0.5
    weights = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)

    def of_head(name: str) -> tuple[Tensor, Tensor]:  # (T, C, ·) of queries, of keys
        streams = getattr(reading, name).of_layers()[layer - attention.encoding.source]
        return streams.queries[0, :, head], streams.keys[0, :, head * streams.keys.shape[2] // streams.queries.shape[2]]

    gates = [torch.cat(both, dim=-1)[:, cursor] for both in zip(of_head("reset"), of_head("move"), strict=True)]
    spread = of_head("histograms")
    kinds = ("query", "key")
    return Trace(
        words(tokens[0]), asked, layer, head, cursor,
        {kind: found.cpu() for kind, found in zip(kinds, gates, strict=True)},
        {kind: found.argmax(-1).cpu() for kind, found in zip(kinds, spread, strict=True)},
        {kind: found[:, cursor].cpu() for kind, found in zip(kinds, spread, strict=True)},
        weights.cpu(), float(attention.encoding.mix[head].sigmoid()), attention.encoding.alpha[head].abs().cpu(),
    )  # fmt: skip


def _choose(layers: list[Any], layer: int | None, head: int | None, cursor: int | None) -> tuple[int, int, int]:
    """What is not said is where (1 − μ)|α| is greatest."""
    alpha = torch.stack([part.encoding.alpha.abs() * (1 - part.encoding.mix.sigmoid()[:, None]) for part in layers])
    for name, value, size in zip(("layer", "head", "cursor"), (layer, head, cursor), alpha.shape, strict=True):
        if value is not None and not 0 <= value < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {value}")
    allowed = torch.zeros_like(alpha)
    allowed[tuple(slice(None) if place is None else place for place in (layer, head, cursor))] = 1
    best = int((alpha * allowed + allowed).argmax())
    return best // alpha[0].numel(), best // alpha.shape[2] % alpha.shape[1], best % alpha.shape[2]
