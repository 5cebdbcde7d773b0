"""The figures of "Conformal Transformations for Symmetric Power Transformers", small.

    python -m deadreckon.lab.power_figures --data books --save power-figures.json

First, the loss at the end of training against the context that was trained on, every step reading as many tokens;
second, the loss by position up to some times that context. The paper trains 124 million parameters on contexts of 256
to 65 536 tokens of LongCrawl64, whose documents are all as long as the longest.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import deadreckon as dr
from deadreckon.lab.markdown import table
from deadreckon.lab.perplexity import loss_by_position
from deadreckon.lab.text_runs import Run, arguments, command, compare, numbers, plan_of
from deadreckon.tasks.language import open_corpus

POWERS_OF = ("sympow", "sympow-gated", "conformal-sympow")


def main() -> bool:
    """The command."""
    parser = arguments("Loss by context and by position for symmetric powers.", encodings=["rope", *POWERS_OF])
    parser.add_argument("--powers", type=numbers, default=[2, 4], help="p of encodings that have one")
    parser.add_argument("--lengths", type=numbers, default=[256, 1024, 4096], help="contexts to train on")
    parser.add_argument("--beyond", type=int, default=4, help="evaluate up to so many times the context")
    parser.add_argument("--bins", type=int, default=32, help="of positions")
    return run(parser.parse_args())


def run(chosen: argparse.Namespace) -> bool:
    """Trains and evaluates every encoding at every context; whether all are done."""
    plan = plan_of(chosen, chosen.beyond * max(chosen.lengths))
    valid = open_corpus(chosen.data, "valid")
    runs = [
        Run(encoding, length, options)
        for length in chosen.lengths
        for encoding in chosen.encodings
        for options in ([(("p", p),) for p in chosen.powers] if encoding in POWERS_OF else [()])
    ]
    settings = {"beyond": chosen.beyond, "bins": chosen.bins, "tokens": chosen.tokens}

    def evaluate(model: dr.DeadReckonForCausalLM, run: Run, say: Callable[[str], None]) -> dict[str, Any]:
        far = chosen.beyond * run.length
        scores = loss_by_position(model, valid, far, chosen.bins, tokens=chosen.tokens)
        for score in (scores[len(scores) // 2], scores[-1]):
            say(f"tokens {score.first} to {score.last} of a row: loss {score.loss:.4f}")
        return {"positions": [asdict(score) for score in scores]}

    done, found = compare(runs, plan, evaluate, settings, chosen.save, chosen.minutes)
    print(tabulate(found))
    return done


def tabulate(runs: list[dict[str, Any]]) -> str:
    """The loss of each run at the end of training, and on other text within its context and beyond.

    A bin of positions on both sides of the border counts on neither.
    """
    rows = []
    for run in runs:
        within = mean_loss([score for score in run["positions"] if score["last"] <= run["length"]])
        beyond = mean_loss([score for score in run["positions"] if score["first"] > run["length"]])
        name = " ".join([run["encoding"], *(f"{key}={value}" for key, value in run["options"])])
        rows.append([name, run["length"], f"{run['loss']:.4f}", f"{within:.4f}", f"{beyond:.4f}"])
    return table(["encoding", "context", "training loss", "loss within", "loss beyond"], rows)


def mean_loss(scores: list[dict[str, Any]]) -> float:
    """Over all positions of these bins; not a number where there are none."""
    counts = [score["last"] - score["first"] + 1 for score in scores]
    total = sum(count * score["loss"] for count, score in zip(counts, scores, strict=True))
    return total / sum(counts) if scores else math.nan


if __name__ == "__main__":
    command(main)
