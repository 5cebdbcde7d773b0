"""Language models trained alike on any text: --change options.data=FILE options.held_out=FILE."""

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


def text(
    about: str,
    source: str,
    encodings: tuple[str, ...],
    paper: Recipe,
    small: dict[str, Any] | None = None,
    part: str = "valid",
    **more: Any,
) -> Experiment:
    """Language modelling, with the sizes and tests that all such experiments share.

    Args:
        small: what differs at that size from the others' small recipes.
        part: of the text, to test on.
    """
    return Experiment(
        about=about, source=source, encodings=encodings,
        paper=replace(
            paper, task="language", initial=0.02, conditions={"held out": {"part": part}}, betas=(0.9, 0.95),
            longest=max(paper.test_lengths), test_tokens=2**20, validation_rows=8, log_every=10,
        ),
        small={
            "layers": 8, "width": 384, "heads": 6, "steps": 4000, "batch_size": max(1, 2**15 // paper.length),
            "accumulate": 1, "learning_rate": 1e-3, "warmup": 200, "schedule": "cosine", "floor": 0.1,
            "options": {"vocabulary": 8192}, "test_tokens": 2**18, "evaluate_every": 400,
        } | (small or {}),
        tiny={
            "layers": 2, "width": 64, "heads": 2, "length": 128, "steps": 300, "batch_size": 16, "accumulate": 1,
            "learning_rate": 4e-3, "warmup": 30, "schedule": "cosine", "floor": 0.1, "options": {"vocabulary": 1024},
            "test_lengths": (64, 128, 256, 512), "test_tokens": 2**13, "evaluate_every": 100, "log_every": 1,
        },
        **more,
    )  # fmt: skip


def path_paper(text_name: str, steps: int) -> Experiment:
    """PaTH's language models: its size and budget, or 34 million parameters and `steps` of 131 072 tokens."""
    return text(
        f"{text_name}, read up to 65 536 tokens: what data-dependent position encodings gain at the training length, "
        "and what is left of it beyond.",
        "Yang et al. 2025, table 2 and figure 3: 760M parameters, 50B tokens, 2M a step, trained at 4096. There FoX, "
        "PaTH and PaTH-FoX are 0.036, 0.053 and 0.091 nats ahead of RoPE at the training length; beyond it RoPE breaks "
        "down, FoX and PaTH-FoX stay flat. The text, layers and heads are ours. Small: 8 layers of 512, heads of 64, "
        f"tied embeddings, {steps * 2**17 // 10**6} million tokens, trained at 2048; one learning rate for all.",
        ("rope", "fox", "path", "path-fox"),
        Recipe(
            length=4096, layers=24, width=1536, heads=24, steps=24_000, batch_size=512, accumulate=64,
            learning_rate=1e-3, warmup=480, weight_decay=0.01, schedule="cosine", floor=0.03,
            options={"vocabulary": 32_000}, evaluate_every=500,
            evaluators=("perplexity", "perplexity-window", "loss-by-position"),
            test_lengths=(2048, 4096, 8192, 16_384, 32_768, 65_536),
        ),
        small={
            "width": 512, "heads": 8, "tied": True, "length": 2048, "batch_size": 64, "steps": steps,
            "learning_rate": 2e-3, "warmup": steps // 15, "weight_decay": 0.1,
            # Documents are far longer than rows: one row in forty reaches over an end. So rows are streamed, which is
            # faster than packing them. In two parts, four models fit on one GPU.
            "accumulate": 2,
            "options": {"vocabulary": 16_384}, "test_tokens": 2**20, "evaluate_every": 250,
            # As its authors' code draws them; PaTH was 0.015 nats better for it on books, PaTH-FoX 0.010.
            "encoding_options": {"path": {"initial": 0.02}, "path-fox": {"initial": 0.02}},
        },
        part="test",
    )  # fmt: skip


TEXT = {
    "rotations": text(
        "Text, learnt at 512 tokens: rotations that accumulate, and RoPE.",
        "Why Do Accumulated Transformations Extrapolate?, tables 1 and 2. The text, the learning rate (constant; the "
        "paper lowers its own twice) and no dropout are ours.",
        tuple(ROTATIONS_REPORTED),
        Recipe(
            length=512, layers=16, width=768, heads=8, steps=200_000, batch_size=32, learning_rate=3e-4, warmup=0,
            weight_decay=0.1, schedule="constant", options={"vocabulary": 32_000}, evaluate_every=2000,
            evaluators=("perplexity", "perplexity-window"),
            test_lengths=(512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
        ),
        reported={"held out": ROTATIONS_REPORTED},
    ),
    "code": path_paper("Source code, whole directories of the Linux kernel (examples/data/make_tokens.py)", 1500),
    "books": path_paper("Books, whole novels (examples/data/make_tokens.py)", 300),
    "powers": text(
        "Text: loss by training length and by position, with even powers in place of exp.",
        "Kumar et al. 2025, figures 1 and 2: like GPT-2 of 124M parameters, 524 288 tokens a step at every training "
        "length, documents of LongCrawl64, Adam (AdamW without weight decay is the same) at a constant rate. The text, "
        "the number of steps and four times the training length are ours. Small: RMSNorm and SwiGLU in place of "
        "GPT-2's LayerNorm and GELU (--change block=gpt2 for these), and a rate that falls.",
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
}  # fmt: skip
