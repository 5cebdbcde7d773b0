"""The eight tasks of the PRISM paper: trained on short sequences, exact match at longer ones.

Sizes are the paper's: five layers of eight heads, tied embeddings, width 192 with PRISM and 512 for the baselines; the
baseline's sinusoids start at a random position in training. γ is initialised to 2, gates have no noise, and a penalty
of 1e-3 keeps the GRU's matrix orthogonal: these are defaults of the encoding, and results/ says where it departs from
them. The paper has 140 cursors, here there are 160, four to each head. α is initialised to 20, so that cursors tell
positions apart from the start: the paper does not give its initial value. As in the paper, tests are run every 1000
steps, and a figure is the mean of the three best evaluations, for each length on its own; the paper starts evaluating
once the loss is below 0.1.

The paper's baseline is `sinusoidal`, and in its figure 18 `randomized`; `rope` is ours.
"""

from __future__ import annotations

from typing import Any

from deadreckon.lab.recipes.experiment import Experiment, quicker
from deadreckon.lab.recipes.recipe import Recipe
from deadreckon.tasks.curriculum import PRISM_CURRICULA, Curriculum, prism_curriculum

COPY_BRANCH = ("reverse", "scan", "dynamic-copy")  # tasks in which one in five query cursors may jump
TWO_MODULES = ("odds-first", "stack")  # cursors are computed before layers 1 and 4
FROM_40 = (4, 8, 12, 16, 20, 40, 60, 80, 100)
FROM_10 = (5, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100)


def options(width: int, superposition: int, similarity: float, more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Encoding options at a model's width: sinusoids are as wide as the embeddings."""
    gain = (2 / width) ** 0.5
    return {
        "prism": {"width": superposition, "similarity": similarity, "positions": "train_positions", **more},
        "sinusoidal": {"shift": "test_positions", "gain": gain},
        "randomized": {"gain": gain},
    }


def prism(
    task: str,
    about: str,
    where: str,
    lengths: tuple[int, ...],
    *,
    longest: int = 0,
    conditions: dict[str, dict[str, Any]] | None = None,
) -> Experiment:
    """One of the tasks, trained up to `longest`, by default the paper's length; `where` cites the paper's section."""
    curriculum = prism_curriculum(longest) if longest else PRISM_CURRICULA[task]
    short = min(curriculum.longest, 8)
    copy = {"copy": 5 if task in COPY_BRANCH else 0}
    modules = {"modules": [0, 3]} if task in TWO_MODULES else {}
    return Experiment(
        about=about,
        source=f"The PRISM paper, {where}: its curriculum and, at size paper, its rate of 9e-5, 150 000 steps and 1000 "
        "test examples; smaller sizes have a higher rate, fewer steps and fewer examples. Schedule, weight decay and "
        "what α begins with are ours.",
        paper=Recipe(
            task=task, length=curriculum.longest, curriculum=curriculum, layers=5, width=512, heads=8, tied=True,
            initial=512**-0.5, encoding_options=options(512, 340, 20.0, copy | modules),
            steps=150_000, batch_size=100, learning_rate=9e-5, betas=(0.9, 0.98), weight_decay=0.01,
            warmup=1000, schedule="constant", evaluators=("exact",), reporting="best-three",
            conditions=conditions or {"as trained": {}}, test_lengths=lengths, test_rows=1000, test_autocast=False,
            evaluate_every=1000, validation_rows=200, log_every=100,
        ),
        small={
            "steps": 5000, "learning_rate": 3e-4, "warmup": 100, "schedule": "linear", "test_rows": 200,
            "curriculum": quicker(curriculum, 20), "evaluate_every": 500, "log_every": 20,
        },
        tiny={
            "layers": 2, "width": 64, "heads": 2, "initial": 0.125, "steps": 600, "batch_size": 64, "warmup": 50,
            "learning_rate": 3e-3, "schedule": "linear", "length": short, "curriculum": Curriculum(short),
            "encoding_options": options(64, 32, 10.0, copy), "evaluate_every": 200, "validation_rows": 64,
            "test_lengths": tuple(sorted({short, *(n for n in lengths if n <= 3 * short)})), "test_rows": 100,
            "log_every": 1,
        },
        encodings=("prism", "sinusoidal", "randomized", "rope"),
        by_encoding={"prism": {"width": 192, "initial": 192**-0.5}},
    )  # fmt: skip


PRISM = {
    "addition": prism("addition", "Add two numbers, digit by digit.", "figure 1", (5, 10, 12, 15, 20, 25, 30, 40)),
    "dynamic-copy-5": prism(
        "dynamic-copy", "Copy from a given digit on, learnt up to 5 digits.", "figure 2", (2, 3, 4, 5, 6, 8, 10),
        longest=5,
    ),
    "dynamic-copy": prism(
        "dynamic-copy", "Copy from a given digit on, learnt up to 10 digits.", "figure 3", (2, 4, 6, 8, 10, 12, 16, 20)
    ),
    "scan": prism(
        "scan", "Carry out commands of a small language.", "figure 4",
        (4, 8, 12, 16, 20, 22, 24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48),  # all that the test split has
        conditions={"up to 22 actions": {"split": "train"}, "more than 22": {"split": "test"}},
    ),
    "reverse": prism("reverse", "Say a row of digits backwards.", "figure 5", FROM_40),
    "reverse-10": prism("reverse", "Say a row of digits backwards, learnt up to 10.", "section 8", FROM_10, longest=10),
    "copy-10": prism("copy", "Copy a row of digits, learnt up to 10.", "figure 6", FROM_10, longest=10),
    "copy": prism("copy", "Copy a row of digits, learnt up to 40.", "figure 7", FROM_40),
    "odds-first": prism("odds-first", "Every other digit first.", "figure 8", FROM_40),
    "multiplication": prism(
        "multiplication", "Take a product apart.", "figure 9", (2, 4, 6, 8, 9, 10, 12, 14, 16),
        conditions={"n×n": {"equal": True}},
    ),
    "stack": prism("stack", "What is on a stack after pushing and popping?", "figure 10", FROM_40),
}  # fmt: skip
