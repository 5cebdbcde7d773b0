"""Runs a probe: hooks on one forward pass collect findings on every head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import deadreckon as dr
from deadreckon.lab.evaluation.scores import judge
from deadreckon.lab.probe.findings import Findings, Head
from deadreckon.lab.probe.layers import Options, UndefinedError, distance_bins, probe_layer
from deadreckon.lab.probe.reach import measure, measure_more, middle
from deadreckon.lab.probe.transport import SHORTEST, route_lengths
from deadreckon.tasks.task import NOT_SCORED


@torch.no_grad()
def run_probe(
    model: dr.DeadReckonForCausalLM, tokens: Tensor, out: Path | None = None, *, labels: Tensor | None = None,
    trained: int | None = None, window: int | None = None, tolerance: float = 0.1, queries: int = 32,
    routes: int = 1024, keep: float = 0.5, seed: int = 0,
) -> Findings:  # fmt: skip
    """Probes every head of every layer while the model reads some tokens.

    Args:
        model: on any device; left unchanged.
        tokens: (B, T) whole sequences without padding. T should exceed the trained length, for a measured range.
        out: a folder for probe.json and probe.png; nothing is written by default.
        labels: (B, T) positions where the loss counts, as tasks give them; everywhere by default.
        trained: the training length; T by default. If it is less than T, and there are no labels, each token's loss is
            compared with its loss in a context of that length, for a measured range.
        window: distance from which a token is far, for all heads. By default each head's mixing window, if that is at
            most T / 4, else a quarter of the trained length.
        tolerance: ‖E[T_ℓ]‖ below which a route counts as mixed.
        queries: number sampled in each sequence, from its second half; with labels, from those that predict one in
            every sequence, if there are any: the attention of other queries may not matter.
        routes: about how many to average where steps do not commute.
        keep: the predicted range ends where near mass has fallen to this share of what it was at the trained length.
        seed: of the choice of queries, and of encodings that draw random numbers.
    """
    _check(model, tokens, labels, trained, window, tolerance, queries, routes, keep)
    length, device = tokens.shape[1], next(model.parameters()).device
    tokens = tokens.to(device)
    second = _second_half(labels, length)
    order = torch.randperm(len(second), generator=torch.Generator().manual_seed(seed))[:queries]
    places = second[order].sort().values.to(device)
    options = Options(places, window, tolerance, routes, trained or length, keep)
    heads: list[Head] = []
    undefined: dict[str, str] = {}
    training = model.training
    model.eval()
    torch.manual_seed(seed)
    try:
        try:
            with _watched(model, options, heads, undefined):
                hidden = model.model(tokens).last_hidden_state
            finite = bool(hidden.isfinite().all())
        except torch.linalg.LinAlgError:  # what it says of numbers that are not finite
            finite = False
        if not finite:
            raise ValueError("model: expected numbers in every layer, got some that are infinite or none (NaN)")
        losses = _losses(model, hidden, tokens if labels is None else labels.to(device))
        short = None
        if labels is None and trained is not None and trained < length:
            short = _losses_as_trained(model, tokens, trained)
    finally:
        model.train(training)
    scored = torch.ones_like(losses, dtype=torch.bool) if labels is None else labels[:, 1:].to(device) != NOT_SCORED
    ends, loss, error = _by_place(losses, scored)
    more = None if short is None else _by_place(losses - short, scored)
    measured = measure(ends, loss, error, options.trained) if more is None else measure_more(*more, options.trained)
    findings = Findings(
        about={
            "encodings": model.config.encodings(), "rows": tokens.shape[0], "length": length, "trained": trained,
            "tolerance": tolerance, "queries": len(places), "routes": routes, "keep": keep, "seed": seed,
            "deadreckon": dr.__version__, "torch": torch.__version__,
        },
        lengths=route_lengths(length // 2), bins=distance_bins(length), heads=heads,
        predicted=middle([head.range for head in heads]), measured=measured,
        undefined=undefined, places=ends, loss=loss, loss_error=error, loss_more=None if more is None else more[1],
    )  # fmt: skip
    if out is not None:
        from deadreckon.lab.probe.report import probe_picture

        findings.save(out / "probe.json")
        if heads:
            probe_picture(findings, out / "probe.png")
    return findings


def _second_half(labels: Tensor | None, length: int) -> Tensor:
    """Query positions to sample from, in the second half: those that predict a label in all rows, or else all."""
    places = torch.arange(length // 2, length)
    if labels is None:
        return places
    answers = (labels.cpu() != NOT_SCORED).all(0).roll(-1)[places] & (places < length - 1)
    return places[answers] if answers.any() else places


def _check(
    model: object, tokens: Tensor, labels: Tensor | None, trained: int | None, window: int | None, tolerance: float,
    queries: int, routes: int, keep: float,
) -> None:  # fmt: skip
    if not isinstance(model, dr.DeadReckonForCausalLM):
        raise ValueError(f"model: expected a DeadReckonForCausalLM, got {type(model).__name__}")
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(f"tokens: expected integers (B, T), got {tokens.dtype} {tuple(tokens.shape)}")
    (rows, length), vocabulary = tokens.shape, model.config.vocab_size
    if rows < 1 or length < SHORTEST:
        raise ValueError(f"tokens: expected a row of {SHORTEST} or more, got {(rows, length)}")
    low, high, shape = int(tokens.min()), int(tokens.max()), tokens.shape if labels is None else labels.shape
    said = torch.zeros(1) if labels is None else labels[labels != NOT_SCORED]
    spoken = bool(((said >= 0) & (said < vocabulary)).all())
    in_vocabulary = f"numbers from 0 to {vocabulary - 1}, the model's vocabulary"
    for name, right, expected, got in (
        ("tokens", 0 <= low <= high < vocabulary, in_vocabulary, f"{low} to {high}"),
        ("labels", shape == tokens.shape, f"(B, T) = {(rows, length)}", tuple(shape)),
        ("labels", spoken, f"{in_vocabulary}, and {NOT_SCORED}", "others"),
        ("trained", trained is None or trained >= 4, "a length of 4 or more", trained),
        ("window", window is None or 1 <= window <= length // 2, f"between 1 and T / 2 = {length // 2}", window),
        ("tolerance", 0 < tolerance < 1, "a number between 0 and 1", tolerance),
        ("queries", queries >= 1, "1 or more", queries),
        ("routes", routes >= 1, "1 or more", routes),
        ("keep", 0 < keep < 1, "a share between 0 and 1", keep),
    ):
        if not right:
            raise ValueError(f"{name}: expected {expected}, got {got}")


@contextmanager
def _watched(
    model: dr.DeadReckonForCausalLM, options: Options, heads: list[Head], undefined: dict[str, str]
) -> Iterator[None]:
    """Within this context, a forward pass adds findings to `heads`, or reasons for having none to `undefined`."""
    names = model.config.encodings()
    for number, name in enumerate(names):  # until its attention is seen
        undefined[f"layer {number}"] = f"{name} went another way than through the layer's attention"

    def watch(number: int, name: str, layer: Any) -> list[RemovableHandle]:
        went_in: dict[str, Any] = {}

        def encoded(module: object, inputs: Any, factors: Any) -> None:
            went_in.update(x=inputs[0], context=inputs[1], factors=factors)

        def attended(module: object, inputs: Any) -> None:
            try:
                if not isinstance(went_in.get("factors"), dr.Factors):
                    raise UndefinedError(f"{name} does not say what it does in factors")
                heads.extend(probe_layer(number, name, layer, output=inputs[0], options=options, **went_in))
                del undefined[f"layer {number}"]
            except UndefinedError as why:
                undefined[f"layer {number}"] = str(why)
            went_in.clear()

        return [layer.encoding.register_forward_hook(encoded), layer.o_proj.register_forward_pre_hook(attended)]

    layers = [part.get_submodule("self_attn") for part in model.model.layers]
    hooks = [hook for number, name in enumerate(names) for hook in watch(number, name, layers[number])]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _losses(model: dr.DeadReckonForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token but the first, (B, T − 1), zero where there is no label."""
    return judge(model, hidden[:, :-1], labels[:, 1:])[0].double()


def _losses_as_trained(model: dr.DeadReckonForCausalLM, tokens: Tensor, trained: int) -> Tensor:
    """The same with the context limited to the trained length, and at least half of it where there is as much."""
    length, half = tokens.shape[1], trained // 2
    losses = torch.empty(len(tokens), length - 1, dtype=torch.float64, device=tokens.device)
    for start in (*range(0, length - trained, half), length - trained):
        piece = tokens[:, start : start + trained]
        known = half - 1 if start else 0  # what the piece before has seen better
        read = _losses(model, model.model(piece).last_hidden_state, piece)
        losses[:, start + known : start + trained - 1] = read[:, known:]
    return losses


def _by_place(losses: Tensor, scored: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Last position, mean and standard error of bins that grow by a quarter; bins without a label are left out."""
    ends, means, errors = [], [], []
    start, length = 0, losses.shape[1]
    while start < length:
        end = min(max(start + 8, start + start // 4), length)
        values = losses[:, start:end][scored[:, start:end]]
        if len(values):
            ends.append(end)  # losses[:, t] is of token t + 1
            means.append(float(values.mean()))
            errors.append(float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0)
        start = end
    return ends, means, errors
