"""Recipes for tables and figures of the papers, at three sizes.

`paper` has the model, lengths and budget of the paper; what a paper does not say is ours, and said here to be. `small`
takes minutes on a GPU. `tiny` is the same question asked of a CPU: about a minute for each model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import deadreckon as dr
from deadreckon.lab.recipe import Recipe
from deadreckon.tasks.curriculum import PRISM_CURRICULA, Curriculum

SIZES = ("tiny", "small", "paper")
TITLES = {
    "rope": "RoPE", "fox": "FoX", "path": "PaTH", "path-fox": "PaTH-FoX", "alibi": "ALiBi", "nope": "NoPE",
    "prism": "PRISM",
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Args:
        about: what is learnt.
        source: where it is from, and what of its recipe is ours.
        paper: the recipe.
        small, tiny: what is smaller.
        encodings: those that are compared in it, as far as they are here.
        reported: what the paper found at the length it trained at, by test and encoding, in the metric's measure.
    """

    about: str
    source: str
    paper: Recipe
    small: dict[str, Any]
    tiny: dict[str, Any]
    encodings: tuple[str, ...] = ("rope", "fox", "path", "path-fox")
    reported: dict[str, dict[str, float]] = field(default_factory=dict)

    def recipe(self, size: str) -> Recipe:
        """At one of `SIZES`."""
        return self.paper if size == "paper" else replace(self.paper, **(self.small if size == "small" else self.tiny))


FLIPFLOP = Experiment(
    about="Flip-flop: say the bit that was written last, past any number of distractions.",
    source="Yang et al. 2025, table 1; steps, batch and optimiser are those of the task's authors, Liu et al. 2023, "
    "the rate is ten times theirs: at 3e-4 PaTH knows the task as trained, and not the sparse one.",
    paper=Recipe(
        task="flip-flop", length=512, layers=1, width=64, heads=2, initial=0.02,
        steps=10_000, batch_size=16, learning_rate=3e-3, weight_decay=0.1, warmup=50, schedule="linear",
        metric="error", conditions={"as trained": {}, "sparse": {"ignore": 0.98}, "dense": {"ignore": 0.1}},
        test_lengths=(128, 256, 512, 1024, 2048, 4096), test_rows=4000, test_tokens=2**21,
        evaluate_every=500, validation_rows=128, log_every=10,
    ),
    small={
        "length": 256, "steps": 2000, "batch_size": 32, "learning_rate": 4e-3, "initial": 0.1,
        "test_lengths": (64, 128, 256, 512, 1024, 2048), "test_tokens": 2**18, "evaluate_every": 200,
    },
    tiny={
        "length": 128, "steps": 500, "batch_size": 32, "learning_rate": 8e-3, "initial": 0.1, "warmup": 30,
        "test_lengths": (32, 64, 128, 256, 512, 1024), "test_rows": 256, "test_tokens": 2**16,
        "evaluate_every": 100, "log_every": 1,
    },
    encodings=("rope", "stickbreaking", "fox", "path"),
    reported={
        "as trained": {"rope": 0.069, "stickbreaking": 0.096, "fox": 0.083, "path": 0.0},
        "sparse": {"rope": 0.403, "stickbreaking": 0.389, "fox": 0.363, "path": 1e-6},
        "dense": {"rope": 1e-4, "stickbreaking": 0.0, "fox": 0.0, "path": 0.0},
    },
)  # fmt: skip


def quicker(curriculum: Curriculum, times: int) -> Curriculum:
    """The same lengths in a fraction of the steps."""
    return replace(curriculum, stages=tuple((steps // times, longest) for steps, longest in curriculum.stages))


A5_LENGTHS = Curriculum(
    20, ((600, 4), (600, 6), (1200, 8), (1600, 10), (2000, 12), (2000, 14), (2000, 16), (2000, 18)), shortest=2
)


def a5(layers: int) -> Experiment:
    """The word problem for transformers of so many layers."""
    return Experiment(
        about="The A5 word problem: is a word over three generators and their inverses the identity? Half of them are. "
        f"{layers} layer{'s' * (layers > 1)}.",
        source="Yang et al. 2025, figure 2: solved where more than 90% of answers are right. Width, budget and lengths "
        "that grow are ours; so is a weight decay of 0.1: with less, PaTH with two layers was not seen to solve it.",
        paper=Recipe(
            task="a5-identity", length=20, curriculum=A5_LENGTHS, layers=layers, width=128, heads=8, initial=0.04,
            steps=20_000, batch_size=512, learning_rate=1e-3, betas=(0.9, 0.98), weight_decay=0.1, warmup=200,
            metric="exact", test_lengths=(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40), test_rows=1000,
            evaluate_every=1000, validation_rows=500, log_every=50,
        ),
        small={"steps": 10_000, "curriculum": quicker(A5_LENGTHS, 2)},
        tiny={
            "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 4e-3, "warmup": 50,
            "initial": 0.1, "length": 8, "curriculum": Curriculum(8, shortest=2), "test_lengths": (2, 4, 6, 8, 12, 16),
            "test_rows": 500, "evaluate_every": 100, "log_every": 1,
        },
        encodings=("rope", "stickbreaking", "fox", "path"),
    )  # fmt: skip


PRODUCT_LENGTHS = Curriculum(20, ((4000, 4), (8000, 6), (8000, 8), (8000, 12), (8000, 16)), shortest=2)
A5_PRODUCTS = Experiment(
    about="The A5 word problem: say the product of all permutations so far.",
    source="Merrill, Petty and Sabharwal 2024: lengths 2 to 20, a fifth of the rows held out, solved where more than "
    "90% of rows are right throughout. Width, budget and lengths that grow are ours.",
    paper=Recipe(
        task="a5-products", options={"part": "train"}, length=20, curriculum=PRODUCT_LENGTHS,
        layers=4, width=512, heads=16, initial=0.02, steps=50_000, batch_size=256, learning_rate=3e-4,
        weight_decay=0.1, warmup=500, schedule="cosine", metric="exact", conditions={"held out": {"part": "test"}},
        test_lengths=(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40), test_rows=1000,
        evaluate_every=1000, validation_rows=500, log_every=50,
    ),
    small={
        "layers": 2, "width": 256, "steps": 20_000, "learning_rate": 1e-3, "curriculum": quicker(PRODUCT_LENGTHS, 3),
    },
    tiny={
        "layers": 2, "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 4e-3, "warmup": 50,
        "initial": 0.1, "length": 6, "curriculum": Curriculum(6, shortest=2), "test_lengths": (2, 3, 4, 5, 6, 8, 12),
        "test_rows": 500, "evaluate_every": 100, "log_every": 1,
    },
    encodings=("rope", "stickbreaking", "fox", "path"),
)  # fmt: skip


def mqrar(back: int) -> Experiment:
    """Recall, so far back."""
    return Experiment(
        about=f"MQRAR-{back}: what was a key's {('last', '2nd last', '3rd last', '4th last')[back - 1]} value?",
        source="Yang et al. 2025, figure 2: 32 keys, length 768, 2 layers, width 256, 2 heads. The budget is ours.",
        paper=Recipe(
            task="mqrar", options={"back": back}, length=768, layers=2, width=256, heads=2, initial=0.02,
            steps=20_000, batch_size=32, learning_rate=1e-3, weight_decay=0.1, warmup=500, schedule="cosine",
            metric="error", test_lengths=(256, 384, 512, 768, 1024, 1536, 3072), test_rows=256, test_tokens=2**19,
            evaluate_every=1000, validation_rows=64, log_every=20,
        ),
        small={"steps": 4000, "batch_size": 64, "learning_rate": 2e-3},
        tiny={
            "options": {"back": back, "keys": 4, "values": 8}, "length": 64, "width": 64, "steps": 600,
            "batch_size": 32, "learning_rate": 5e-3, "warmup": 50, "initial": 0.1,
            "test_lengths": (32, 48, 64, 96, 128, 256), "test_tokens": 2**15, "evaluate_every": 100, "log_every": 1,
        },
        encodings=("rope", "stickbreaking", "fox", "path"),
    )  # fmt: skip


def prism(
    task: str,
    about: str,
    figure: str,
    lengths: tuple[int, ...],
    *,
    longest: int = 0,
    conditions: dict[str, dict[str, Any]] | None = None,
) -> Experiment:
    """One of the tasks of the PRISM paper, for its baseline transformer."""
    curriculum = Curriculum(longest, ((5000, 5),) if longest > 5 else ()) if longest else PRISM_CURRICULA[task]
    short = min(curriculum.longest, 8)
    reach = [length for length in lengths if length <= 3 * short]
    return Experiment(
        about=about,
        source=f"The PRISM paper, figure {figure}: 5 layers of width 512 with 8 heads, tied, rates to 9e-5, curriculum."
        " Schedule and weight decay are ours.",
        paper=Recipe(
            task=task, length=curriculum.longest, curriculum=curriculum, layers=5, width=512, heads=8, tied=True,
            initial=0.02, steps=150_000, batch_size=100, learning_rate=9e-5, betas=(0.9, 0.98), weight_decay=0.01,
            warmup=1000, schedule="constant", metric="exact", conditions=conditions or {"as trained": {}},
            test_lengths=lengths, test_rows=1000, evaluate_every=1000, validation_rows=200, log_every=100,
        ),
        small={"width": 192, "heads": 6, "steps": 20_000, "learning_rate": 5e-4, "curriculum": quicker(curriculum, 10)},
        tiny={
            "layers": 2, "width": 64, "heads": 2, "initial": 0.1, "steps": 600, "batch_size": 64, "warmup": 50,
            "learning_rate": 4e-3, "schedule": "linear", "tied": False, "length": short,
            "curriculum": Curriculum(short), "test_lengths": tuple(reach), "test_rows": 200, "evaluate_every": 100,
            "log_every": 1,
        },
        encodings=("sinusoidal", "randomized", "rope", "path-fox"),
    )  # fmt: skip


def text(about: str, source: str, encodings: tuple[str, ...], paper: Recipe) -> Experiment:
    """Language modelling on texts that are named with --change options.data=… options.held_out=…"""
    longest = max(paper.test_lengths)
    return Experiment(
        about=about, source=source, encodings=encodings,
        paper=replace(
            paper, task="language", initial=0.02, metric="perplexity", conditions={"held out": {"part": "valid"}},
            longest=longest, test_rows=200, test_tokens=2**20, validation_rows=8, log_every=10,
        ),
        small={
            "layers": 8, "width": 384, "heads": 6, "steps": 4000, "batch_size": max(1, 2**15 // paper.length),
            "accumulate": 1, "learning_rate": 1e-3, "warmup": 200, "schedule": "cosine", "floor": 0.1,
            "options": {"vocabulary": 8192}, "test_tokens": 2**18, "evaluate_every": 400,
        },
        tiny={
            "layers": 2, "width": 64, "heads": 2, "length": 128, "steps": 300, "batch_size": 16, "accumulate": 1,
            "learning_rate": 4e-3, "warmup": 30, "schedule": "cosine", "floor": 0.1, "options": {"vocabulary": 1024},
            "test_lengths": (64, 128, 256, 512), "test_tokens": 2**13, "evaluate_every": 100, "log_every": 1,
        },
    )  # fmt: skip


RECIPES: dict[str, Experiment] = {
    "flipflop": FLIPFLOP,
    **{f"a5-{layers}": a5(layers) for layers in (1, 2, 3, 4)},
    "a5-products": A5_PRODUCTS,
    **{f"mqrar-{back}": mqrar(back) for back in (1, 2, 3, 4)},
    "addition": prism("addition", "Add two numbers, digit by digit.", "1", (2, 4, 6, 8, 10, 12, 16, 20, 30, 40)),
    "dynamic-copy-5": prism(
        "dynamic-copy", "Copy from a given digit on, learnt up to 5 digits.", "2", (2, 3, 4, 5, 6, 8, 10), longest=5
    ),
    "dynamic-copy": prism(
        "dynamic-copy", "Copy from a given digit on, learnt up to 10 digits.", "3", (2, 4, 6, 8, 10, 12, 16, 20)
    ),
    "scan": prism(
        "scan", "Carry out commands of a small language.", "4", (4, 8, 12, 16, 20, 22, 24, 28, 30, 32, 36, 40, 48),
        conditions={"up to 22 actions": {"split": "train"}, "more than 22": {"split": "test"}},
    ),
    "reverse": prism("reverse", "Say a row of digits backwards.", "5", (4, 8, 12, 16, 20, 40, 60, 80, 100)),
    "copy-10": prism("copy", "Copy a row of digits, learnt up to 10.", "6", (4, 8, 10, 12, 16, 20, 30, 40), longest=10),
    "copy": prism("copy", "Copy a row of digits, learnt up to 40.", "7", (4, 8, 12, 16, 20, 40, 60, 80, 100)),
    "odds-first": prism("odds-first", "Every other digit first.", "8", (4, 8, 12, 16, 20, 40, 60, 80, 100)),
    "multiplication": prism(
        "multiplication", "Take a product apart.", "9", (2, 4, 6, 8, 9, 10, 12, 14, 16),
        conditions={"n×n": {"equal": True}},
    ),
    "stack": prism("stack", "What is on a stack after pushing and popping?", "10", (4, 8, 12, 16, 20, 40, 60, 80, 100)),
    "rotations": text(
        "Text, learnt at 512 tokens, with rotations that add up and such that do not.",
        "Why Do Accumulated Transformations Extrapolate?, tables 1 and 2. The text, the learning rate (constant; the "
        "paper lowers its own twice) and no dropout are ours.",
        ("rope", "rope-values", "random-rotation", "random-rotation-values", "learned-rotation",
         "learned-rotation-values", "alibi"),
        Recipe(
            length=512, layers=16, width=768, heads=8, steps=200_000, batch_size=32, learning_rate=3e-4, warmup=0,
            weight_decay=0.1, schedule="constant", options={"vocabulary": 32_000}, evaluate_every=2000,
            test_lengths=(512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
        ),
    ),
    "extrapolation": text(
        "Text, learnt at 4096 tokens, read up to 65 536.",
        "Yang et al. 2025, figure 3: 760M parameters, 50B tokens, 2M a step. The text, layers and heads are ours.",
        ("rope", "fox", "path", "path-fox"),
        Recipe(
            length=4096, layers=24, width=1536, heads=24, steps=24_000, batch_size=512, accumulate=64,
            learning_rate=1e-3, warmup=480, weight_decay=0.01, schedule="cosine", floor=0.03,
            options={"vocabulary": 32_000}, evaluate_every=500, test_lengths=(4096, 8192, 16_384, 32_768, 65_536),
        ),
    ),
    "powers": text(
        "Text, learnt at 16 384 tokens, with even powers for exp.",
        "Kumar et al. 2025, figure 2: like GPT-2 of 124M parameters, 524 288 tokens a step. The text and the number of "
        "steps are ours.",
        ("rope", "sympow", "sympow-gated", "conformal-sympow"),
        Recipe(
            length=16_384, layers=12, width=768, heads=12, steps=20_000, batch_size=32, accumulate=16,
            learning_rate=6e-4, warmup=0, weight_decay=0.0, schedule="constant", options={"vocabulary": 32_000},
            evaluate_every=500, test_lengths=(1024, 4096, 16_384, 32_768, 65_536),
        ),
    ),
}  # fmt: skip


def find_experiment(name: str) -> Experiment:
    """By its name."""
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}; got {name!r}")
    return RECIPES[name]


def find_recipe(
    name: str, size: str = "tiny", encoding: str = "path-fox", seed: int = 0, changes: tuple[str, ...] = ()
) -> Recipe:
    """The whole recipe of a run."""
    experiment = find_experiment(name)
    if size not in SIZES:
        raise ValueError(f"size: expected one of {', '.join(SIZES)}; got {size!r}")
    check_encodings((encoding,))
    return replace(experiment.recipe(size).change(changes), encoding=encoding, seed=seed)


def check_encodings(names: tuple[str, ...]) -> None:
    """Says so if there is no such encoding, or none is asked for."""
    if not names:
        raise ValueError("encodings: expected at least one name, got none")
    for name in names:
        if name not in dr.ENCODINGS:
            raise ValueError(f"encoding: expected one of {', '.join(dr.ENCODINGS)}; got {name!r}")


def title_of(label: str) -> str:
    """An encoding as its authors write it, with the options behind its name, if any: "sympow p=4"."""
    encoding, *options = label.split(" ", 1)
    return " ".join([TITLES.get(encoding, encoding), *options])
