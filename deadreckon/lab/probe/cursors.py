"""Traces PRISM's cursors, its program counter, while a trained model answers one question."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.pages.pictures import COLOURS, drawing
from deadreckon.lab.probe.attention import maps_of
from deadreckon.lab.probe.source import check_vocabulary
from deadreckon.tasks import task


class Pair(NamedTuple):
    """A query cursor and its key cursor; fields that are None are chosen automatically."""

    layer: int | None = None
    head: int | None = None
    cursor: int | None = None


ANY = Pair()
SIDES = {"query": COLOURS[2], "key": COLOURS[5]}


class Trace(NamedTuple):
    """A trace of one head, and of one pair of its cursors, on a sequence of T tokens."""

    words: list[str]
    asked: int  # how many of them are the question
    pair: Pair
    gates: dict[str, Tensor]  # (T, 4) of the pair's query and key cursor: reset, +1, −1, stay
    modes: dict[str, Tensor]  # (T, C) of all of the head's
    histograms: dict[str, Tensor]  # (T, P) of the pair's
    attention: Tensor  # (T, T)
    mix: float
    alpha: Tensor  # (C,)


def words(tokens: Tensor) -> list[str]:
    """Tokens of a row as text; ? for tokens outside the alphabet, which a model may predict all the same."""
    return [task.ALPHABET[token] if token < len(task.ALPHABET) else "?" for token in tokens.tolist()]


def written(spelt: list[str]) -> str:
    """Joins words into a line."""
    return (" " if max(map(len, spelt)) > 1 else "").join(spelt)


def answer(model: dr.DeadReckonForCausalLM, question: str) -> tuple[Tensor, int]:
    """Tokens (1, T) of a question, = and the model's answer, and how many of them, = included, are the question.

    If text follows the =, it is taken for the answer: this shows what cursors do with one that is not the model's.
    """
    check_vocabulary(model)
    before, _, given = question.partition("=")
    asked = task.encode(before + "=", "question").to(model.device)
    if given.strip():
        return task.encode(question, "question").to(model.device), asked.shape[1]
    room = 4 * asked.shape[1] + 20
    said = model.generate(
        asked, max_new_tokens=room, do_sample=False, eos_token_id=task.END, pad_token_id=task.PAD,
        use_cache=False,  # some encodings have none
    )  # fmt: skip
    return said, asked.shape[1]


def layers_of(model: dr.DeadReckonForCausalLM) -> list[Any]:
    """The attention layers of a model; raises unless all of them have cursors."""
    layers: list[Any] = [part.self_attn for part in model.model.layers]
    if not all(hasattr(part.encoding, "cursors") for part in layers):
        raise ValueError(f"model: expected one with the encoding prism, got {model.config.encodings()}")
    return layers


@torch.no_grad()
def trace(model: dr.DeadReckonForCausalLM, tokens: Tensor, asked: int, pair: Pair = ANY) -> Trace:
    """Traces one head on tokens (1, T); by default the one to whose logits position contributes most."""
    layers = layers_of(model)
    layer, head, cursor = _choose(layers, pair)
    attention = layers[layer]
    owner = layers[attention.encoding.source]
    caught: list[Any] = []
    hook = owner.encoding.cursors.register_forward_pre_hook(lambda _, inputs: caught.append(inputs))
    try:
        weights = maps_of(model, tokens)[layer, head]
    finally:
        hook.remove()
    x, context, _ = caught[0]
    reading = owner.encoding.cursors.read(x, context)

    def of_head(name: str) -> tuple[Tensor, Tensor]:  # (T, C, ·) of queries, of keys
        streams = getattr(reading, name).of_layers()[layer - attention.encoding.source]
        return streams.queries[0, :, head], streams.keys[0, :, head * streams.keys.shape[2] // streams.queries.shape[2]]

    gates = [torch.cat(both, dim=-1)[:, cursor] for both in zip(of_head("reset"), of_head("move"), strict=True)]
    spread = dict(zip(SIDES, of_head("histograms"), strict=True))
    return Trace(
        words(tokens[0]), asked, Pair(layer, head, cursor),
        {side: gate.cpu() for side, gate in zip(SIDES, gates, strict=True)},
        {side: histogram.argmax(-1).cpu() for side, histogram in spread.items()},
        {side: histogram[:, cursor].cpu() for side, histogram in spread.items()},
        weights.cpu(), float(attention.encoding.mix[head].sigmoid()), attention.encoding.alpha[head].abs().cpu(),
    )  # fmt: skip


def _choose(layers: list[Any], pair: Pair) -> tuple[int, int, int]:
    """Chooses fields that are None where (1 − μ)|α| is greatest."""
    alpha = torch.stack([part.encoding.alpha.abs() * (1 - part.encoding.mix.sigmoid()[:, None]) for part in layers])
    for name, value, size in zip(Pair._fields, pair, alpha.shape, strict=True):
        if value is not None and not 0 <= value < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {value}")
    allowed = torch.zeros_like(alpha)
    allowed[tuple(slice(None) if place is None else place for place in pair)] = 1
    best = int((alpha * allowed + allowed).argmax())
    return best // alpha[0].numel(), best // alpha.shape[2] % alpha.shape[1], best % alpha.shape[2]


def show(model: dr.DeadReckonForCausalLM, question: str, path: Path, pair: Pair = ANY) -> str:
    """Generates the answer, plots the cursors, and returns question and answer as text."""
    tokens, asked = answer(model, question)
    cursors_picture(trace(model, tokens, asked, pair), path)
    return written(words(tokens[0]))


def cursors_picture(trace: Trace, path: Path) -> None:
    """Plots gates and histograms of a pair of cursors, the modes of all of its head's cursors, and its attention."""
    size = len(trace.words)
    reach = int(max(modes.max() for modes in trace.modes.values())) + 2
    width = min(18.0, 9.5 + 0.16 * size)  # titles need so much
    fitting = max(3.0, min(9.0, 220 / size))  # font size at which so many words fit side by side
    image: Any = {"aspect": "auto", "cmap": "Blues", "vmin": 0, "interpolation": "nearest"}
    with drawing(path, 2, 3, font=9, figsize=(width, 0.5 * width)) as (figure, grid):
        for axes, side in zip(grid[:, 0], SIDES, strict=True):
            axes.imshow(trace.gates[side].T.numpy(), vmax=1, **image)
            axes.set_yticks(range(4), ("reset", "+1", "−1", "stay"))
            axes.set_title(f"what its {side} cursor does")
        for axes, side in zip(grid[:, 1], SIDES, strict=True):
            shown = trace.histograms[side][:, :reach].T.numpy()
            axes.imshow(shown, origin="lower", **image)
            axes.set(title=f"where its {side} cursor may be", ylabel="position")
            axes.yaxis.get_major_locator().set_params(integer=True)
        modes, attention = grid[:, 2]
        for side, colour in SIDES.items():
            for number, places in enumerate(trace.modes[side].T.tolist()):
                chosen = number == trace.pair.cursor
                label = f"{side} cursor {number}" if chosen else None
                shape = {"linewidth": 2.5, "alpha": 1.0} if chosen else {"linewidth": 1.0, "alpha": 0.35}
                modes.plot(range(size), places, color=colour, label=label, drawstyle="steps-mid", **shape)
        modes.set(title="likeliest positions, all its cursors", ylabel="position")
        modes.yaxis.get_major_locator().set_params(integer=True)
        modes.legend(frameon=False)
        attention.imshow(trace.attention.numpy(), vmax=1, **image)
        attention.set(title="attention of the head", ylabel="from")
        attention.set_yticks(range(size), trace.words, fontsize=fitting)
        for axes in grid.flat:
            axes.set_xticks(range(size), trace.words, fontsize=fitting, rotation=90 * (max(map(len, trace.words)) > 1))
            if axes is not attention:
                axes.axvline(trace.asked - 0.5, color="#555555", linestyle="--", linewidth=1)
                axes.set_xlim(-0.5, size - 0.5)
        names = ", ".join(f"{name} {number}" for name, number in trace.pair._asdict().items())
        figure.suptitle(f"{names}:   μ = {trace.mix:.2f},  |α| = {', '.join(f'{a:.1f}' for a in trace.alpha.tolist())}")
