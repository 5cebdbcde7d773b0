"""The findings of a probe, as plain numbers that JSON can hold. None stands for undefined."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deadreckon.lab.files import write_text


@dataclass
class Mixing:
    """How fast the mean transport of a head's routes decays; lists are indexed like `Findings.lengths`."""

    norm: list[float]  # ‖E[T_ℓ]‖, the largest singular value of the mean route
    typical: list[float]  # the root of their mean square, freed from noise
    noise: list[float]  # what `norm` would be if the mean were zero
    size: list[float]  # the same root for single routes, 1 for orthogonal steps
    step: float  # ρ = ‖E[T_1]‖
    rate: float  # decay of `norm` per step, fitted to lengths where it stands clear of the noise
    error: float  # of the rate
    gap: float | None  # 1 − rate; None if that is less than three errors
    gap_ceiling: float  # what the gap is not above
    window: int | None  # tokens after which ‖E[T_ℓ]‖ is below the tolerance, by the rate; None without a gap
    mixed: list[float] | None  # for rotations, the share of pairs whose mean is below the tolerance or twice its noise
    pair_rates: list[float] | None  # for rotations, the rate of each pair; the slowest is `rate`
    second: float | None  # for reflections, ‖E[T ⊗ T]‖ of a step on matrices without a trace (Assumption 2: below 1)


@dataclass
class Scores:
    """Logits by distance, without gates, and the gaps between near and far ones, in nats."""

    by_distance: list[float]  # mean logit in each of `Findings.bins`
    gap_mean: float  # mean near logit − mean far logit
    gap_best: float  # highest near − highest far, with gates: the margin of a single near target (Theorem 2)
    gap_weight: float | None  # log of the mean near weight over the mean far weight, with gates; not stick-breaking


@dataclass
class Mass:
    """Attention mass by distance, and its far part."""

    by_distance: list[float]  # share of the attention in each of `Findings.bins`
    far: float  # share beyond the window, averaged over queries
    error: float | None  # its standard error; None of a single query
    floor: float | None  # Proposition 3's lower bound from the largest near and the smallest far logit; softmax only
    norm_floor: float | None  # the same from the norms of queries and keys alone; no gates, no route that stretches
    ceiling: float | None  # Proposition 1's upper bound from the highest near and far logits
    far_norm: float  # ‖far weights‖₂


@dataclass
class Values:
    """How much of the far values cancels in their weighted sum."""

    plain: float  # ‖Σ far a v‖ / Σ far a ‖v‖ of values as they are
    # The same of values carried along their routes; None without transport. Reflections with β < 2 also shrink them,
    # by `Mixing.size`.
    carried: float | None
    transport: float | None  # ‖Σ far a U‖ / Σ far a, which is 1 without value transport; None but for rotations
    bound: float | None  # Theorem 7's bound of that; 1 where it says nothing
    in_use: bool  # whether the encoding carries values


@dataclass
class Reach:
    """A length of context. `tokens` is None where there is no limit, or none that was seen; `why` says which."""

    tokens: float | None
    why: str


@dataclass
class Head:
    """One head of one layer."""

    layer: int
    head: int
    encoding: str
    transport: str
    window: int  # where far begins for this head
    window_from: str  # "given", "mixing" (the mixing window) or "assumed", where there is none short enough
    mixing: Mixing | None
    gates: list[float] | None  # E[Π f] over routes of each length
    scores: Scores
    mass: Mass
    values: Values
    range: Reach  # the length at which the near mass will have fallen to a half of what it was where it was trained
    # The number of far tokens whose values sum up to the norm that near values could have at most, if they cancel as
    # much as here: values as they are, and carried along their routes. None with gates and stick-breaking.
    drowned: float | None
    drowned_carried: float | None


@dataclass
class Findings:
    """All findings of a probe."""

    about: dict[str, Any]  # what was probed, and how
    lengths: list[int]  # of routes
    bins: list[int]  # first distance of each bin; the last bin is open
    heads: list[Head]  # of all layers that could be probed, in order
    predicted: Reach  # the median of the heads' ranges
    measured: Reach  # where the loss leaves what it was where the model was trained
    undefined: dict[str, str] = field(default_factory=dict)  # what is not there, and why, by layer or name
    places: list[int] = field(default_factory=list)  # the last position of each bin of positions
    loss: list[float] = field(default_factory=list)  # mean loss of the tokens in it
    loss_error: list[float] = field(default_factory=list)  # its standard error
    loss_more: list[float] | None = None  # how far that is above the same tokens' in a context of the trained length

    def save(self, path: Path) -> None:
        """Writes the findings as JSON."""
        write_text(path, json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Reads what `save` wrote."""

        def read(data: dict[str, Any]) -> Any:
            kinds = (Mixing, Scores, Mass, Values, Reach, Head, cls)
            return next((kind(**data) for kind in kinds if data.keys() == kind.__annotations__.keys()), data)

        loaded: Findings = json.loads(path.read_text(), object_hook=read)
        return loaded
