"""A conversion: a RoPE checkpoint to another encoding, as stages that are recipes.

start     the model itself: new parts are zero and learn at once; where RoPE is to be dropped, they are drawn as usual,
          times a factor of 0; cold, they are whatever the encoding begins with
align     each layer's attention like the teacher's, while RoPE's angles fade and new parts grow, if it is dropped
distil    the next token's distribution like the teacher's
extend    next-token training at a longer context
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deadreckon.lab.recipes.experiment import check_encodings
from deadreckon.lab.recipes.recipe import SCHEDULABLE, Recipe

STAGES: dict[str, dict[str, Any]] = {
    "align": {"objective": "align", "steps": 1000, "learning_rate": 1e-3, "warmup": 50},
    "distil": {"objective": "distil", "steps": 4000, "learning_rate": 2e-4, "warmup": 100},
    "extend": {"objective": "next-token", "steps": 1000, "learning_rate": 1e-4, "warmup": 50},
}
"""Fields of each stage's recipe, in the order in which stages run."""
STEP_TOKENS = {"align": 2**14, "distil": 2**14, "extend": 2**16}
"""A teacher's distributions say more than next tokens do: more and smaller steps learn more from the same text."""
LONGER = 4  # times the length: what `extend` trains at
TESTED = (1, 2, 4, 8, 16)  # times the length: where models are scored in the end
# By the share of the first stage in which RoPE is dropped: the factor on its angles, and on β and log f beside them.
FADING = {"angle_factor": [[0.0, 1.0], [0.2, 0.0]], "new_factor": [[0.0, 0.0], [0.2, 1.0]]}


@dataclass(frozen=True)
class Conversion:
    """What to convert to what, and how.

    Attributes:
        source: folder of the model and its tokenizer.
        encoding: a name in `deadreckon.ENCODINGS`; with `drop_rope`, of what is left in the end.
        data, held_out: texts to learn from and to test on, see `read_language`.
        drop_rope: end without RoPE's rotation.
        cold: begin with the encoding's usual initialisation, which changes the model.
        stages: None for those that have something to teach: align and distil where the start is not exact or does not
            stay so, else extend. A teacher's equal learns nothing from it: gradients are rounding, which AdamW
            makes full steps of.
        changes: fields of recipes, "steps=100" in all stages or "align.steps=100" in one.
        beside: folders of other models of that vocabulary, which are measured, too: trained from scratch, say.
    """

    source: str
    encoding: str
    data: str
    held_out: str = ""
    drop_rope: bool = False
    cold: bool = False
    stages: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()
    length: int = 1024
    seed: int = 0
    changes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for stage in self.planned:
            if stage not in STAGES:
                raise ValueError(f"stages: expected some of {', '.join(STAGES)}; got {stage!r}")
        if len({*self.planned}) < len(self.planned):
            raise ValueError(f"stages: expected each once, got {', '.join(self.planned)}")
        if self.length < 1:
            raise ValueError(f"length: expected 1 or more, got {self.length}")
        check_encodings((self.encoding,))
        if self.drop_rope and self.cold:
            raise ValueError("drop_rope: expected it without cold, which begins without the rotation, got both")
        if self.drop_rope and "angle_factor" not in SCHEDULABLE.get(self.begun, ()):
            raise ValueError(f"drop_rope: expected to end with path-fox, path or fox, got {self.ended!r}")
        if self.drop_rope and not self.planned:
            raise ValueError("drop_rope: expected a stage in which the angles fade, got none")

    @property
    def departs(self) -> bool:
        """Whether the model is, or comes to be, other than the teacher before it is trained to be like it."""
        return self.drop_rope or self.cold

    @property
    def planned(self) -> tuple[str, ...]:
        """The stages, in whatever order they were named."""
        if self.stages is None:
            return ("align", "distil") if self.departs else ("extend",)
        return self.stages

    @property
    def begun(self) -> str:
        """The encoding in training: one with RoPE's rotation, where that is to be dropped."""
        return f"rope-{self.ended}" if self.drop_rope else self.encoding

    @property
    def ended(self) -> str:
        """The encoding in the end."""
        return self.encoding.removeprefix("rope-") if self.drop_rope else self.encoding

    def recipes(self, out: Path) -> Iterator[tuple[str, Recipe]]:
        """The recipe of each stage, in order; each begins with what the one before has left in the folder `out`."""
        start = out / "start"
        for stage in (stage for stage in STAGES if stage in self.planned):
            length = self.length * (LONGER if stage == "extend" else 1)
            recipe = Recipe(
                task="language", options={"data": self.data, "held_out": self.held_out, "tokenizer": self.source},
                length=length, batch_size=max(1, STEP_TOKENS[stage] // length), encoding=self.begun, seed=self.seed,
                betas=(0.9, 0.95), weight_decay=0.01, schedule="cosine", floor=0.1, evaluators=("perplexity",),
                conditions={"held out": {"part": "valid"}}, test_lengths=(self.length,), test_tokens=2**18,
                validation_rows=8, evaluate_every=200, log_every=10, freeze=self.freeze, start=str(start),
                reporting="every",
                schedules=FADING if self.drop_rope and start == out / "start" else {},
                teacher="" if stage == "extend" else self.source, **STAGES[stage],
            )  # fmt: skip
            recipe = recipe.change(self._changes_of(stage))
            if recipe.scheduled_at(recipe.steps - 1).get("angle_factor"):
                raise ValueError(f"{stage}.steps: expected more, so that the angles reach 0 in it, got {recipe.steps}")
            yield stage, recipe
            start = out / stage / "last"

    def _changes_of(self, stage: str) -> list[str]:
        others = tuple(f"{other}." for other in STAGES if other != stage)
        return [change.removeprefix(f"{stage}.") for change in self.changes if not change.startswith(others)]

    def test_lengths(self) -> tuple[int, ...]:
        """Where teacher and student are scored in the end."""
        return tuple(times * self.length for times in TESTED)

    def test_recipe(self) -> Recipe:
        """The tests of the report, in the form of a recipe."""
        _, recipe = next(replace(self, stages=("distil",), drop_rope=False, freeze=()).recipes(Path()))
        return replace(recipe, test_lengths=self.test_lengths())

    def sample_tests(self, count: int, length: int) -> Tensor:
        """So many rows of each test, the same at every call."""
        recipe = self.test_recipe()
        tasks = map(recipe.make_task, recipe.conditions)
        return torch.cat([task.sample(count, length, torch.Generator().manual_seed(0))[0] for task in tasks])
