"""What a probe finds, as plain numbers that JSON holds. None stands for what is not defined."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Mixing:
    """How routes of a head lose their direction; lists go by `Findings.lengths`.

    Attributes:
        norm: ‖E[T_ℓ]‖, the largest singular value of the mean route.
        typical: the root of their mean square, freed from noise.
        noise: what `norm` would be if the mean were zero.
        size: the same root for single routes, 1 for orthogonal steps.
        step: ρ = ‖E[T_1]‖.
        rate: decay of `norm` per step, fitted to lengths where it stands clear of the noise.
        error: of the rate.
        gap: 1 − rate; None if that is less than three errors.
        gap_ceiling: what the gap is not above.
        window: tokens after which ‖E[T_ℓ]‖ is below the tolerance, by the rate; None without a gap.
        mixed: for rotations, the share of pairs whose mean phasor is below the tolerance or twice its noise.
        pair_rates: for rotations, the rate of each pair; the slowest is `rate`.
    """

    norm: list[float]
    typical: list[float]
    noise: list[float]
    size: list[float]
    step: float
    rate: float
    error: float
    gap: float | None
    gap_ceiling: float
    window: int | None
    mixed: list[float] | None
    pair_rates: list[float] | None


@dataclass
class Scores:
    """Logits by distance, gates left out, and what sets near ones apart from far ones, in nats.

    Attributes:
        by_distance: mean logit in each of `Findings.bins`.
        gap_mean: mean near logit − mean far logit.
        gap_best: highest near − highest far, gates included: what a single near target has in hand (Theorem 2).
        gap_weight: log of the mean near weight over the mean far weight, gates included; None for stick-breaking.
    """

    by_distance: list[float]
    gap_mean: float
    gap_best: float
    gap_weight: float | None


@dataclass
class Mass:
    """Attention by distance, and what of it is far.

    Attributes:
        by_distance: share of the attention in each of `Findings.bins`.
        far: share beyond the window, averaged over queries.
        error: its standard error; None of a single query.
        floor: Proposition 3's lower bound from the largest near and the smallest far logit; softmax only.
        norm_floor: the same from the lengths of queries and keys alone; no gates, no route that stretches.
        ceiling: Proposition 1's upper bound from the highest near and far logits.
        far_norm: ‖far weights‖₂.
    """

    by_distance: list[float]
    far: float
    error: float | None
    floor: float | None
    norm_floor: float | None
    ceiling: float | None
    far_norm: float


@dataclass
class Values:
    """How much of the far values cancels when they are summed up.

    Attributes:
        plain: ‖Σ far a v‖ / Σ far a ‖v‖ of values as they are.
        carried: the same of values carried along their routes; None without transport. Reflections with β < 2 also
            shrink them, by `Mixing.size`.
        transport: ‖Σ far a U‖ / Σ far a, which is 1 without value transport; None but for rotations.
        bound: Theorem 7's bound of that; 1 where it says nothing.
        in_use: whether the encoding carries values.
    """

    plain: float
    carried: float | None
    transport: float | None
    bound: float | None
    in_use: bool


@dataclass
class Reach:
    """A length of context. `tokens` is None where there is no limit, or none that was seen; `why` says which."""

    tokens: float | None
    why: str


@dataclass
class Head:
    """One head of one layer. `gates` is E[Π f] over routes of each length.

    Attributes:
        window: where far begins for this head.
        window_from: "given", "mixing" (the mixing window) or "assumed", where there is none short enough.
        range: the length at which the near mass will have fallen to a half of what it was where it was trained.
        drowned: the number of far tokens whose values, summed up, are as loud as all near ones could be, if no more of
            them cancels than does here; values as they are. None with gates and for stick-breaking.
        drowned_carried: the same, values carried along their routes.
    """

    layer: int
    head: int
    encoding: str
    transport: str
    window: int
    window_from: str
    mixing: Mixing | None
    gates: list[float] | None
    scores: Scores
    mass: Mass
    values: Values
    range: Reach
    drowned: float | None
    drowned_carried: float | None

    @classmethod
    def read(cls, found: dict[str, Any]) -> Head:
        parts = {"mixing": Mixing, "scores": Scores, "mass": Mass, "values": Values, "range": Reach}
        return cls(**{
            name: parts[name](**value) if name in parts and value is not None else value
            for name, value in found.items()
        })  # fmt: skip


@dataclass
class Findings:
    """All that a probe has found.

    Attributes:
        about: what was probed, and how.
        lengths: of routes.
        bins: first distance of each bin; the last bin is open.
        heads: of all layers that could be probed, in order.
        undefined: what is not there, and why, by layer or name.
        places: the last position of each bin of positions.
        loss: mean loss of the tokens in it.
        loss_error: its standard error.
        loss_more: by how much that is above the loss of the same tokens in a context of the trained length.
        predicted: the median of the heads' ranges.
        measured: where the loss leaves what it was where the model was trained.
    """

    about: dict[str, Any]
    lengths: list[int]
    bins: list[int]
    heads: list[Head]
    predicted: Reach
    measured: Reach
    undefined: dict[str, str] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    loss_error: list[float] = field(default_factory=list)
    loss_more: list[float] | None = None

    def save(self, path: Path) -> None:
        """Writes JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Reads what `save` has written."""
        found = json.loads(path.read_text())
        found["heads"] = [Head.read(head) for head in found["heads"]]
        return cls(**{**found, "predicted": Reach(**found["predicted"]), "measured": Reach(**found["measured"])})
