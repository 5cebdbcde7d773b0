"""Conversion of a RoPE checkpoint to another encoding, as training stages that are recipes.

start     the converted model: new parts are zero but have gradients; if RoPE is to be dropped, they are initialised as
          usual, times a factor of 0; cold, they have the encoding's own initialisation
align     match each layer's attention to the teacher's, while RoPE's angles fade and new parts grow, if it is dropped
distil    match the teacher's distribution of the next token
extend    next-token training at a longer context length
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
# By the share of the first stage, if RoPE is dropped: the factor on its angles, and the one on β and log f beside them.
FADING = {"angle_factor": [[0.0, 1.0], [0.2, 0.0]], "new_factor": [[0.0, 0.0], [0.2, 1.0]]}


@dataclass(frozen=True)
class Conversion:
    """What to convert, to which encoding, and how.

    Attributes:
        source: folder of the model and its tokenizer.
        encoding: a name in `deadreckon.ENCODINGS`; with `drop_rope`, the one that is left in the end.
        data, held_out: training and held-out text, see `read_language`.
        drop_rope: end without RoPE's rotation.
        cold: start with the encoding's usual initialisation, which changes the model.
        stages: None for the default: align and distil if the start is not exact or RoPE is dropped, else extend. An
            exact copy learns nothing from its teacher: its gradients are rounding noise, which AdamW scales to full
            steps.
        changes: recipe fields, "steps=100" in all stages or "align.steps=100" in one.
        beside: folders of other models with that vocabulary to evaluate too, such as one trained from scratch.
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
        """Whether the model differs from the teacher, at the start or as RoPE fades, before it is distilled."""
        return self.drop_rope or self.cold

    @property
    def planned(self) -> tuple[str, ...]:
        """The stages to run, in whatever order they were named."""
        if self.stages is None:
            return ("align", "distil") if self.departs else ("extend",)
        return self.stages

    @property
    def begun(self) -> str:
        """The encoding during training: one with RoPE's rotation, if that is to be dropped."""
        return f"rope-{self.ended}" if self.drop_rope else self.encoding

    @property
    def ended(self) -> str:
        """The final encoding."""
        return self.encoding.removeprefix("rope-") if self.drop_rope else self.encoding

    def recipes(self, out: Path) -> Iterator[tuple[str, Recipe]]:
        """The recipe of each stage, in order; each starts from the last checkpoint of the one before, in `out`."""
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
        """Lengths at which teacher and student are scored in the end."""
        return tuple(times * self.length for times in TESTED)

    def test_recipe(self) -> Recipe:
        """The tests of the report, as a recipe."""
        _, recipe = next(replace(self, stages=("distil",), drop_rope=False, freeze=()).recipes(Path()))
        return replace(recipe, test_lengths=self.test_lengths())

    def sample_tests(self, count: int, length: int) -> Tensor:
        """`count` rows of each test, the same at every call."""
        recipe = self.test_recipe()
        tasks = map(recipe.make_task, recipe.conditions)
        return torch.cat([task.sample(count, length, torch.Generator().manual_seed(0))[0] for task in tasks])
