"""Predicts a head's usable context length from shorter contexts; and measures, from the loss, where it ended.

The paper proves that far mass must grow and gives no length. The prediction here: beyond the window every far token is
like every other (Theorem 1), so that each has the same odds against near tokens at any length; near mass is
1 / (1 + odds · far tokens), which is the ceiling of the near signal (Proposition 4); and a far token counts for as much
as gates let through. The odds are measured on tokens no farther than the trained length. If routes depend on their
length alone, as in RoPE, there is no window, and farther tokens are like none seen in training: the range ends there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from deadreckon.lab.probe import theory
from deadreckon.lab.probe.findings import Reach

WORSE = 0.1  # nats of loss by which a model is out of its range
CLOSED = 1e-300  # of gates: as little as nothing, and still a number that has a logarithm


class FarTokens:
    """The number of far tokens by context length, each weighted by what gates let through; 1 without gates.

    E[Π f] is measured at some route lengths, interpolated geometrically, and extrapolated at the last rate.
    """

    def __init__(self, window: int, lengths: Sequence[int], gates: Sequence[float] | None) -> None:
        knots, logs = [0, *lengths], np.log([1.0, *np.maximum(gates or [1.0] * len(lengths), CLOSED)])
        self.rate = float(logs[-2] - logs[-1]) / (knots[-1] - knots[-2])  # at which gates close beyond
        self.end = max(window, knots[-1])
        beyond = np.arange(self.end - knots[-1] + 1)
        through = np.exp([*np.interp(range(knots[-1]), knots, logs), *(logs[-1] - self.rate * beyond)])
        through[:window] = 0
        self.window, self.last = window, max(float(through[-1]), CLOSED)
        self.counts = through.cumsum()  # of far tokens up to each distance

    def at(self, length: float) -> float:
        """Far tokens, weighted, of a query that has `length` tokens behind it."""
        if (beyond := length - self.end) <= 0:
            return float(self.counts[int(length)])
        tail = beyond if self.rate < 1e-12 else math.expm1(-self.rate * beyond) / -math.expm1(self.rate)
        return float(self.counts[-1] + self.last * tail)

    def reaching(self, count: float) -> float:
        """The length at which there are `count` of them; infinity if there never are."""
        if count <= self.counts[-1]:
            begin = self.window - 1
            return float(np.interp(count, self.counts[begin:], range(begin, self.end + 1)))
        if self.last < 2 * CLOSED:  # nothing comes through from there on; twice, for rounding
            return math.inf
        more = (count - self.counts[-1]) / self.last
        if self.rate < 1e-12:
            return float(self.end + more)
        share = more * math.expm1(self.rate)
        return self.end - math.log1p(-share) / self.rate if share < 1 else math.inf


def predict(odds: float, tokens: FarTokens, trained: int, keep: float) -> Reach:
    """The length at which near mass has fallen to `keep` of what it was at the trained length."""
    length = tokens.reaching(theory.far_tokens_borne(odds, tokens.at(trained - 1), keep))
    if math.isinf(length):
        return Reach(None, "gates bound what is far, at any length")
    return Reach(length + 1, f"near mass is {keep:g} of that at {trained} tokens")


def middle(reaches: Sequence[Reach]) -> Reach:
    """The median; heads without a limit count as the longest."""
    if not reaches:
        return Reach(None, "no layer could be probed")
    ordered = sorted(reaches, key=lambda reach: math.inf if reach.tokens is None else reach.tokens)
    chosen = ordered[len(ordered) // 2]
    return Reach(chosen.tokens, f"median of {len(ordered)} heads: {chosen.why}")


def measure(places: Sequence[int], loss: Sequence[float], error: Sequence[float], trained: int) -> Reach:
    """The last position before the loss exceeds that within the trained length, by WORSE nats and twice its error.

    The latter is the mean loss of bins in the second half of the trained length.
    """
    usual = [value for place, value in zip(places, loss, strict=True) if trained // 2 <= place < trained]
    if not usual:
        return Reach(None, f"no loss was seen in the second half of the trained length of {trained}")
    limit = sum(usual) / len(usual) + WORSE
    return _first_above(limit, places, loss, error, trained, f"{limit:.3f}, what it was and {WORSE} nats")


def measure_more(places: Sequence[int], more: Sequence[float], error: Sequence[float], trained: int) -> Reach:
    """The last position before tokens lose WORSE nats and twice the error against a context of the trained length."""
    return _first_above(WORSE, places, more, error, trained, f"that of a context as trained and {WORSE} nats")


def _first_above(
    limit: float, places: Sequence[int], values: Sequence[float], error: Sequence[float], trained: int, what: str
) -> Reach:
    last = trained
    for place, value, doubt in zip(places, values, error, strict=True):
        if place >= trained and value - 2 * doubt > limit:
            return Reach(float(last), f"then the loss is above {what}")
        last = max(last, place + 1)
    return Reach(None, f"up to {last} tokens, the longest probed, the loss is below {what}")
