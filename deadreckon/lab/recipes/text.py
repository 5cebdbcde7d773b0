"""Language-model experiments on any text: --change options.data=FILE options.held_out=FILE.

In `long-context`, a fifth of the rows are questions of the long-context suite, so that models learn to answer them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deadreckon.lab.recipes.experiment import Experiment
from deadreckon.lab.recipes.recipe import Recipe

ROTATIONS_REPORTED = {  # tables 1 and 2: 16 layers of width 768 after 3.3 billion tokens of OpenWebText
    "rope": {512: 23.54, 4096: 223.88, 8192: 381.82, 16384: 600.53, 65536: 905.18},
    "rope-values": {512: 23.17, 4096: 127.81, 8192: 214.18, 16384: 306.73, 65536: 485.66},
    "random-rotation": {512: 24.19, 4096: 25.90, 8192: 38.81, 16384: 70.63, 65536: 181.27},
    "random-rotation-values": {512: 24.18, 4096: 22.58, 8192: 24.83, 16384: 27.54, 65536: 38.54},
    "learned-rotation": {512: 23.56, 4096: 22.56, 8192: 27.62, 16384: 38.93, 65536: 139.63},
    "learned-rotation-values": {512: 23.60, 4096: 22.82, 8192: 27.89, 16384: 37.58, 65536: 102.53},
    "alibi": {512: 23.87, 4096: 21.75, 8192: 22.46, 16384: 23.19, 65536: 22.84},
}


LEARNED_ROTATIONS = ("learned-rotation", "learned-rotation-values")


def text(
    about: str,
    source: str,
    encodings: tuple[str, ...],
    paper: Recipe,
    small: dict[str, Any] | None = None,
    tiny: dict[str, Any] | None = None,
    held_out: dict[str, Any] | None = None,
    **more: Any,
) -> Experiment:
    """Language modelling, with the sizes and tests that all such experiments share.

    Args:
        small, tiny: recipe fields that differ from the shared ones at these sizes.
        held_out: options of the held-out text.
    """
    return Experiment(
        about=about, source=source, encodings=encodings,
        paper=replace(
            paper, task="language", initial=0.02, longest=max(paper.test_lengths),
            conditions={"held out": held_out or {"part": "valid"}}, test_tokens=2**20, validation_rows=8, log_every=10,
        ),
        small={
            "layers": 8, "width": 384, "heads": 6, "steps": 4000, "batch_size": max(1, 2**15 // paper.length),
            "accumulate": 1, "learning_rate": 1e-3, "warmup": 200, "schedule": "cosine", "floor": 0.1,
            "options": {"vocabulary": 8192}, "test_tokens": 2**18, "evaluate_every": 400, "betas": (0.9, 0.95),
        } | (small or {}),
        tiny={
            "layers": 2, "width": 64, "heads": 2, "length": 128, "steps": 300, "batch_size": 16, "accumulate": 1,
            "learning_rate": 4e-3, "warmup": 30, "schedule": "cosine", "floor": 0.1, "options": {"vocabulary": 1024},
            "test_lengths": (64, 128, 256, 512), "test_tokens": 2**13, "evaluate_every": 100, "log_every": 1,
            "betas": (0.9, 0.95),
        } | (tiny or {}),
        **more,
    )  # fmt: skip


# The language models of the PaTH paper: 760M parameters.
PATH_RECIPE = Recipe(
    length=4096, layers=24, width=1536, heads=24, steps=24_000, batch_size=512, accumulate=64, learning_rate=1e-3,
    warmup=480, weight_decay=0.01, schedule="cosine", floor=0.03, options={"vocabulary": 32_000}, evaluate_every=500,
    betas=(0.9, 0.95),
    evaluators=("perplexity", "perplexity-window", "loss-by-position"),
    test_lengths=(2048, 4096, 8192, 16_384, 32_768, 65_536),
)  # fmt: skip
# Learning rate and QK-norm are the best for RoPE in a sweep on code, β is the better one for PaTH there
# (`results/code.md`); PaTH's initialisation is that of the authors' layer. Learned rotations are as in
# `results/code-encodings.md`; they would do better with the angles of `rotations`.
PATH_SMALL: dict[str, Any] = {
    "width": 512, "heads": 8, "length": 2048, "batch_size": 64, "learning_rate": 1e-3, "weight_decay": 0.1,
    "evaluate_every": 250, "test_tokens": 2**20, "qk_norm": True,
    "encoding_options": {name: {"initial": 0.02, "beta": 0.1} for name in ("path", "path-fox")}
    | {name: {"rate": 0.02} for name in LEARNED_ROTATIONS},
}  # fmt: skip
WITH_QUESTIONS: dict[str, Any] = {"vocabulary": 32_000, "packed": True, "questions": 0.2}  # a fifth of the rows


def path_paper(text_name: str, steps: int) -> Experiment:
    """PaTH's language models: the paper's size and budget, or 34M parameters and `steps` of 131 072 tokens."""
    return text(
        f"{text_name}, read up to 65 536 tokens: what data-dependent position encodings gain at the training length, "
        "and what is left of it beyond.",
        "Yang et al. 2025, table 2 and figure 3: 760M parameters, 50B tokens, 2M a step, trained at 4096. There FoX, "
        "PaTH and PaTH-FoX are 0.036, 0.053 and 0.091 nats ahead of RoPE at the training length; beyond it RoPE breaks "
        "down, FoX and PaTH-FoX stay flat. The text, layers and heads are ours. Small: 8 layers of 512, QK-norm, "
        f"tied embeddings, {steps * 2**17 / 10**6:.0f} million tokens, trained at 2048; one learning rate for all.",
        ("rope", "fox", "path", "path-fox"),
        PATH_RECIPE,
        small=PATH_SMALL | {
            "tied": True, "steps": steps, "warmup": steps // 15, "options": {"vocabulary": 16_384},
            # Documents are far longer than rows: one row in forty crosses a document boundary. So rows are streamed,
            # which is faster than packing. With gradient accumulation in two parts, four models fit on one GPU.
            "accumulate": 2,
        },
        held_out={"part": "test"},
    )  # fmt: skip


TEXT = {
    "rotations": text(
        "Text, learnt at 512 tokens: rotations that accumulate, and RoPE.",
        "Why Do Accumulated Transformations Extrapolate?, tables 1, 2 and 4. The text, the learning rate (constant; "
        "the paper lowers its own twice), weights drawn from N(0, 0.02) and no dropout are ours. Small: RMSNorm and "
        "SwiGLU in place of the paper's LayerNorm and GELU (--change block=gpt2 for these), a rate that falls, and "
        "one of their own for learned angles.",
        tuple(ROTATIONS_REPORTED),
        Recipe(
            length=512, layers=16, width=768, heads=8, steps=200_000, batch_size=32, learning_rate=3e-4, warmup=0,
            weight_decay=0.1, schedule="constant", options={"vocabulary": 32_000}, evaluate_every=2000,
            evaluators=("perplexity", "perplexity-window"), betas=(0.9, 0.95), block="gpt2",
            test_lengths=(512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
        ),
        # In the paper's 200 000 steps weight decay removes angles that are not learned. A few thousand steps need a
        # learning rate for angles, and angles that start around RoPE's (`results/rotations-learned.md`).
        small={
            "block": "llama",
            "encoding_options": {
                name: {"initial": "rope", "spread": 0.05, "rate": 0.0015} for name in LEARNED_ROTATIONS
            },
        },
        tiny={
            "block": "llama",
            "encoding_options": {name: {"spread": 0.05, "rate": 0.02} for name in LEARNED_ROTATIONS},
        },
        reported={"held out": ROTATIONS_REPORTED},
    ),
    "code": path_paper("Source code, whole directories of the Linux kernel (examples/data/make_tokens.py)", 1500),
    "books": path_paper("Books, whole novels (examples/data/make_tokens.py)", 300),
    "powers": text(
        "Text: loss by training length and by position, with even powers in place of exp.",
        "Kumar et al. 2025, figures 1 and 2: like GPT-2 of 124M parameters, 524 288 tokens a step at every training "
        "length, documents of LongCrawl64, Adam (AdamW without weight decay is the same) at a constant rate. The text, "
        "the number of steps, four times the training length and no LayerNorm after the embeddings are ours. Small: "
        "RMSNorm and SwiGLU in place of GPT-2's LayerNorm and GELU (--change block=gpt2 for these), and a rate that "
        "falls.",
        ("rope", "sympow", "sympow-gated", "conformal-sympow"),
        Recipe(
            length=16_384, layers=12, width=768, heads=12, steps=20_000, batch_size=32, accumulate=16,
            learning_rate=6e-4, warmup=0, weight_decay=0.0, schedule="constant", options={"vocabulary": 32_000},
            evaluate_every=500, evaluators=("loss-by-position", "training-loss"), test_lengths=(65_536,),
            block="gpt2", tied=True,
        ),
        small={"block": "llama", "tied": False},
        sweep={
            "paper": {"length": (256, 1024, 4096, 16_384, 65_536), "p": (2, 4)},
            "small": {"length": (256, 1024, 4096), "p": (2, 4)},
            "tiny": {"length": (32, 128), "p": (2, 4)},
        },
    ),
    "long-context": text(
        "Text and questions about texts of up to 2048 tokens, then the long-context suite up to 32 768, answered "
        "by generation: passkey, RULER's niah, vt, cwe and fwe, PhoneBook, and BABILong where there is data for it.",
        "Yang et al. 2025, table 3: 760M parameters trained on text alone. The text, the size and the mixture "
        "are ours: a fifth of the rows is filled with questions and answers, of which the answers are scored; so are "
        "the questions (`deadreckon/tasks/long/`). vt, cwe and fwe score the share of the strings that are found. "
        "--change options.data=FOLDER options.babi=FILE options.books=FILE",
        ("rope", "fox", "path", "path-fox"),
        replace(
            PATH_RECIPE, tied=True, options=WITH_QUESTIONS, evaluators=("perplexity", "long"),
            test_lengths=(2048, 4096, 8192, 16_384, 32_768), test_rows=100,
        ),
        small=PATH_SMALL | {
            "steps": 1500, "warmup": 100, "options": WITH_QUESTIONS | {"vocabulary": 16_384},
        },
        tiny={
            "length": 512, "steps": 200, "batch_size": 8, "warmup": 20, "test_lengths": (512, 1024), "test_rows": 11,
            "options": WITH_QUESTIONS | {"vocabulary": 1024, "tasks": ["passkey", "phonebook"]},
        },
        held_out={"part": "valid", "questions": 0},
        reported={"phonebook": {
            "rope": {2048: 0.323, 4096: 0.156, 8192: 0.0}, "fox": {2048: 0.625, 4096: 0.385, 8192: 0.177},
            "path": {2048: 0.552, 4096: 0.208, 8192: 0.0}, "path-fox": {2048: 0.896, 4096: 0.938, 8192: 0.666},
        }},
    ),
}  # fmt: skip
