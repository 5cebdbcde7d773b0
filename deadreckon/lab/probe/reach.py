"""How long a context a head bears, from what it does in a shorter one; and where the loss says that it ended.

The paper proves that far mass must grow and gives no length. What follows from it is taken here: beyond the window
every far token is like every other (Theorem 1), so that it has the same odds against what is near at any length; near
mass is 1 / (1 + odds · far tokens), which is the ceiling of the near signal (Proposition 4); and a far token counts for
as much as gates let through. The odds are those of tokens no farther than the trained length. Where routes turn by
their length alone, as in RoPE, there is no window, and farther tokens are like none seen before: the range ends there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from deadreckon.lab.probe import theory
from deadreckon.lab.probe.findings import Reach

WORSE = 0.1  # nats of loss by which a model is out of its range


class FarTokens:
    """How many far tokens there are at a length, counted for what gates let through.

    E[Π f] is measured at some route lengths, is geometric between them, and beyond goes on as between the last two.
    """

    def __init__(self, window: int, lengths: Sequence[int], gates: Sequence[float] | None) -> None:
        self.window, self.gates = window, gates
        if gates is None:
            return
        logs = [0.0, *(math.log(max(gate, 1e-300)) for gate in gates)]
        knots = [0, *lengths]
        self.counts = [0.0]  # of far tokens up to each distance
        for left in range(len(knots) - 1):
            slope = (logs[left + 1] - logs[left]) / (knots[left + 1] - knots[left])
            for distance in range(knots[left] + 1, knots[left + 1] + 1):
                let_through = math.exp(logs[left] + slope * (distance - knots[left]))
                self.counts.append(self.counts[-1] + (let_through if distance >= window else 0.0))
        self.rate = -slope
        self.last = math.exp(logs[-1])

    def at(self, length: float) -> float:
        """Far tokens of a query that has so many tokens behind it."""
        if self.gates is None:
            return max(length - self.window + 1, 0.0)
        beyond = length - (len(self.counts) - 1)
        if beyond <= 0:
            return self.counts[int(length)]
        return self.counts[-1] + self._tail(beyond)

    def _tail(self, beyond: float) -> float:
        if self.rate < 1e-12:
            return self.last * beyond
        return self.last * math.expm1(-self.rate * beyond) / -math.expm1(self.rate)

    def reaching(self, count: float) -> float:
        """The length at which there are so many; infinite where there never are."""
        if self.gates is None:
            return count + self.window - 1
        if count <= self.counts[-1]:
            return next(length for length, found in enumerate(self.counts) if found >= count)
        if self.rate < 1e-12:
            return len(self.counts) - 1 + (count - self.counts[-1]) / self.last
        share = (count - self.counts[-1]) * math.expm1(self.rate) / self.last
        return len(self.counts) - 1 - math.log1p(-share) / self.rate if share < 1 else math.inf


def predict(odds: float, tokens: FarTokens, trained: int, keep: float) -> Reach:
    """The length at which near mass is `keep` of what it was at the trained length."""
    length = tokens.reaching(theory.far_tokens_borne(odds, tokens.at(trained - 1), keep))
    if math.isinf(length):
        return Reach(None, "gates bound what is far, at any length")
    return Reach(length + 1, f"near mass is {keep:g} of that at {trained} tokens")


def middle(reaches: Sequence[Reach]) -> Reach:
    """The median; heads without a limit are the longest."""
    if not reaches:
        return Reach(None, "no layer could be probed")
    ordered = sorted(reaches, key=lambda reach: math.inf if reach.tokens is None else reach.tokens)
    chosen = ordered[len(ordered) // 2]
    return Reach(chosen.tokens, f"median of {len(ordered)} heads: {chosen.why}")


def measure(places: Sequence[int], loss: Sequence[float], error: Sequence[float], trained: int) -> Reach:
    """The last position before the loss is worse, by WORSE nats and twice its error, than where the model was trained.

    That is the mean loss of bins in the second half of the trained length.
    """
    usual = [value for place, value in zip(places, loss, strict=True) if trained // 2 <= place < trained]
    if not usual:
        return Reach(None, f"no loss was seen in the second half of the trained length of {trained}")
    limit = sum(usual) / len(usual) + WORSE
    return _first_above(limit, places, loss, error, trained, f"{limit:.3f}, what it was and {WORSE} nats")


def measure_more(places: Sequence[int], more: Sequence[float], error: Sequence[float], trained: int) -> Reach:
    """The last position before tokens are worse off, by WORSE nats and twice the error, than with a trained context."""
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
