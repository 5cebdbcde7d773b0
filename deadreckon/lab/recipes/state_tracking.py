"""State tracking and recall: flip-flop, the A5 word problem, MQRAR."""

from __future__ import annotations

from dataclasses import replace

from deadreckon.lab.recipes.experiment import SIZES, Experiment, quicker
from deadreckon.lab.recipes.recipe import Recipe
from deadreckon.tasks.curriculum import Curriculum

FLIPFLOP = Experiment(
    about="Flip-flop: say the bit that was written last, past any number of distractions.",
    source="Yang et al. 2025, table 1; steps, batch and optimiser are those of the task's authors, Liu et al. 2023, "
    "the rate is ten times theirs: at 3e-4 PaTH knows the task as trained, and not the sparse one.",
    paper=Recipe(
        task="flip-flop", length=512, layers=1, width=64, heads=2, initial=0.02,
        steps=10_000, batch_size=16, learning_rate=3e-3, weight_decay=0.1, warmup=50, schedule="linear",
        evaluators=("error",), conditions={"as trained": {}, "sparse": {"ignore": 0.98}, "dense": {"ignore": 0.1}},
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
    reported={
        "as trained": {"rope": {512: 0.069}, "stickbreaking": {512: 0.096}, "fox": {512: 0.083}, "path": {512: 0.0}},
        "sparse": {"rope": {512: 0.403}, "stickbreaking": {512: 0.389}, "fox": {512: 0.363}, "path": {512: 1e-6}},
        "dense": {"rope": {512: 1e-4}, "stickbreaking": {512: 0.0}, "fox": {512: 0.0}, "path": {512: 0.0}},
    },
)  # fmt: skip

FLIPFLOP_BEYOND = replace(
    FLIPFLOP,
    about="Flip-flop, read to 16 times the length that it was trained at: how much weight decay does PaTH bear?",
    source="Ours. By weight decay, the logit of the bit to recall ends up just as far above all others as the training "
    "length needs: twice the length takes log 2 from that, until too little attention is left. Without weight decay it "
    "ends up far above.",
    paper=replace(FLIPFLOP.paper, test_lengths=(512, 1024, 2048, 4096, 8192)),
    small=FLIPFLOP.small | {"test_lengths": (256, 512, 1024, 2048, 4096), "test_tokens": 2**19},
    tiny=FLIPFLOP.tiny | {"test_lengths": (128, 512, 1024, 2048), "test_tokens": 2**17},
    encodings=("path",),
    sweep={size: {"weight_decay": (0.0, 0.1, 1.0)} for size in SIZES},
    reported={},
)


A5_LENGTHS = Curriculum(
    20, ((600, 4), (600, 6), (1200, 8), (1600, 10), (2000, 12), (2000, 14), (2000, 16), (2000, 18)), shortest=2
)


def a5(layers: int) -> Experiment:
    """The A5 word problem for transformers with so many layers."""
    return Experiment(
        about="The A5 word problem: is a word over three generators and their inverses the identity? Half of them are. "
        f"{layers} layer{'s' * (layers > 1)}.",
        source="Yang et al. 2025, figure 2: solved where more than 90% of answers are right. Width, budget and lengths "
        "that grow are ours; so is a weight decay of 0.1: with less, PaTH with two layers was not seen to solve it. In "
        "training, models also say the product so far after each letter, as in Merrill et al. 2024, whom the paper "
        "follows; asked for the answer alone, one seed in three learns it.",
        paper=Recipe(
            task="a5-identity", options={"asked": "products"}, conditions={"as trained": {"asked": "end"}}, length=20,
            curriculum=A5_LENGTHS, layers=layers, width=128, heads=8, initial=0.04, ends={"reached": 0.995},
            steps=20_000, batch_size=512, learning_rate=1e-3, betas=(0.9, 0.98), weight_decay=0.1, warmup=200,
            evaluators=("exact",), test_lengths=(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40), test_rows=1000,
            evaluate_every=1000, validation_rows=500, log_every=50,
        ),
        small={"steps": 10_000, "curriculum": quicker(A5_LENGTHS, 2)},
        tiny={
            "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 4e-3, "warmup": 50,
            "initial": 0.1, "length": 8, "curriculum": Curriculum(8, shortest=2), "test_lengths": (2, 4, 6, 8, 12, 16),
            "test_rows": 500, "evaluate_every": 100, "log_every": 1,
        },
        )  # fmt: skip


PRODUCT_LENGTHS = Curriculum(20, ((4000, 4), (8000, 6), (8000, 8), (8000, 12), (8000, 16)), shortest=2)
A5_PRODUCTS = Experiment(
    about="The A5 word problem: say the product of all permutations so far.",
    source="Merrill, Petty and Sabharwal 2024: lengths 2 to 20, a fifth of the rows held out, solved where more than "
    "90% of rows are right throughout. Width, budget and lengths that grow are ours.",
    paper=Recipe(
        task="a5-products", options={"part": "train"}, length=20, curriculum=PRODUCT_LENGTHS,
        layers=4, width=512, heads=16, initial=0.02, steps=50_000, batch_size=256, learning_rate=3e-4,
        weight_decay=0.1, warmup=500, schedule="cosine", evaluators=("exact",),
        conditions={"held out": {"part": "test"}}, test_lengths=(2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 30, 40),
        test_rows=1000, ends={"reached": 0.995}, evaluate_every=1000, validation_rows=500, log_every=50,
    ),
    small={
        "layers": 2, "width": 256, "steps": 20_000, "learning_rate": 1e-3, "curriculum": quicker(PRODUCT_LENGTHS, 3),
    },
    tiny={
        "layers": 2, "width": 64, "heads": 2, "steps": 600, "batch_size": 64, "learning_rate": 4e-3, "warmup": 50,
        "initial": 0.1, "length": 6, "curriculum": Curriculum(6, shortest=2), "test_lengths": (2, 3, 4, 5, 6, 8, 12),
        "test_rows": 500, "evaluate_every": 100, "log_every": 1,
    },
)  # fmt: skip


def mqrar(back: int) -> Experiment:
    """Recall of a key's `back`-th last value."""
    return Experiment(
        about=f"MQRAR-{back}: what was a key's {('last', '2nd last', '3rd last', '4th last')[back - 1]} value?",
        source="Yang et al. 2025, figure 2: 32 keys, length 768, 2 layers, width 256, 2 heads. The budget is ours.",
        paper=Recipe(
            task="mqrar", options={"back": back}, length=768, layers=2, width=256, heads=2, initial=0.02,
            steps=20_000, batch_size=32, learning_rate=1e-3, weight_decay=0.1, warmup=500, schedule="cosine",
            evaluators=("error",), test_lengths=(256, 384, 512, 768, 1024, 1536, 3072), test_rows=256,
            test_tokens=2**19, evaluate_every=1000, validation_rows=64, log_every=20,
        ),
        small={
            "steps": 4000, "batch_size": 64, "ends": {"reached": 0.0005, "patience": 20}, "evaluate_every": 100,
        },
        tiny={
            "options": {"back": back, "keys": 4, "values": 8}, "length": 64, "width": 64, "steps": 600,
            "batch_size": 32, "learning_rate": 5e-3, "warmup": 50, "initial": 0.1,
            "test_lengths": (32, 48, 64, 96, 128, 256), "test_tokens": 2**15, "evaluate_every": 100, "log_every": 1,
        },
        )  # fmt: skip


def grid(experiment: Experiment, about: str, name: str, values: tuple[int, ...] = (1, 2, 3, 4)) -> Experiment:
    """The same experiment, swept over some values in one command."""
    return replace(experiment, about=about, sweep={size: {name: values} for size in SIZES})


STATE_TRACKING = {
    "flipflop": FLIPFLOP,
    "flipflop-beyond": FLIPFLOP_BEYOND,
    **{f"a5-{layers}": a5(layers) for layers in (1, 2, 3, 4)},
    "a5-grid": grid(a5(1), "The A5 word problem, is a word the identity? By number of layers, 1 to 4.", "layers"),
    "a5-products": A5_PRODUCTS,
    "a5-products-grid": grid(
        A5_PRODUCTS, "The A5 word problem, all products so far, by number of layers, 1 to 4.", "layers"
    ),
    **{f"mqrar-{back}": mqrar(back) for back in (1, 2, 3, 4)},
    "mqrar-grid": grid(mqrar(1), "MQRAR-N: what was a key's N-th last value? For N from 1 to 4.", "options.back"),
}
