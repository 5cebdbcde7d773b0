"""Length curricula: how the lengths of training rows grow with the training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curriculum:
    """Lengths from `shortest` to the maximum of the current stage, finally to `longest`.

    Args:
        longest: maximum length of the last stage, which lasts until training ends.
        stages: the stages before it: (number of steps, maximum length).
        shortest: minimum length; lengths that a task does not have are skipped.
    """

    longest: int
    stages: tuple[tuple[int, int], ...] = ()
    shortest: int = 1

    def __post_init__(self) -> None:
        for number in (self.shortest, self.longest, *(number for stage in self.stages for number in stage)):
            if not isinstance(number, int):
                raise TypeError(f"curriculum: expected whole numbers, got {number!r}")
        if self.shortest < 1:
            raise ValueError(f"shortest: expected 1 or more, got {self.shortest}")
        if self.longest < self.shortest:
            raise ValueError(f"longest: expected {self.shortest} or more, got {self.longest}")
        for steps, longest in self.stages:
            if steps < 1 or longest < self.shortest:
                raise ValueError(
                    f"stages: expected 1 or more steps, {self.shortest} or longer, got {steps} steps of {longest}"
                )

    def lengths_at(self, step: int) -> range:
        """The lengths of a step, counted from 0."""
        for steps, longest in self.stages:
            if step < steps:
                return range(self.shortest, longest + 1)
            step -= steps
        return range(self.shortest, self.longest + 1)


def prism_curriculum(longest: int, *, growing: bool = True) -> Curriculum:
    """The PRISM paper's curriculum: 5000 steps up to length 5, 5000 up to 10, then 10 more every 10 000 steps.

    How lengths below the maximum are drawn, the paper does not say; tasks draw them uniformly.

    Args:
        growing: whether to continue by tens, or to go from 10 to the maximum length at once.
    """
    stages = [(5_000, 5), (5_000, 10)]
    if growing:
        stages += [(10_000, length) for length in range(20, longest, 10)]
    return Curriculum(longest, tuple(stage for stage in stages if stage[1] < longest))


# As in the paper's figures. The paper also trains copy up to 10 only, and dynamic copy up to 5 only. In its text
# addition grows beyond 10, in its figure it does not.
PRISM_CURRICULA = {
    "addition": prism_curriculum(10),
    "copy": prism_curriculum(40),
    "reverse": prism_curriculum(40),
    "odds-first": prism_curriculum(40),
    "stack": prism_curriculum(40),
    "scan": prism_curriculum(22, growing=False),
    "dynamic-copy": prism_curriculum(10),
    "multiplication": prism_curriculum(9),
}
