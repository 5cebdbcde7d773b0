"""The table of "Why Do Accumulated Transformations Extrapolate?": trained at 512 tokens, read at up to 65 536.

    python -m deadreckon.lab.rotation_table --data books --save rotation-table.json

The paper trains 16 layers of 768 on 3.3 billion tokens of OpenWebText; here models, text and training are as small as
the options say. As there, training reads a stream over ends of documents, and all positions count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import deadreckon as dr
from deadreckon.lab.markdown import table
from deadreckon.lab.perplexity import perplexity_by_length
from deadreckon.lab.text_runs import Run, arguments, command, compare, numbers, plan_of
from deadreckon.tasks.language import open_corpus

ENCODINGS = (
    "rope", "rope-values", "random-rotation", "random-rotation-values", "learned-rotation", "learned-rotation-values",
    "alibi",
)  # fmt: skip

REPORTED = {  # tables 1 and 2 of the paper
    "rope": {512: 23.54, 4096: 223.88, 8192: 381.82, 16384: 600.53, 65536: 905.18},
    "rope-values": {512: 23.17, 4096: 127.81, 8192: 214.18, 16384: 306.73, 65536: 485.66},
    "random-rotation": {512: 24.19, 4096: 25.90, 8192: 38.81, 16384: 70.63, 65536: 181.27},
    "random-rotation-values": {512: 24.18, 4096: 22.58, 8192: 24.83, 16384: 27.54, 65536: 38.54},
    "learned-rotation": {512: 23.56, 4096: 22.56, 8192: 27.62, 16384: 38.93, 65536: 139.63},
    "learned-rotation-values": {512: 23.60, 4096: 22.82, 8192: 27.89, 16384: 37.58, 65536: 102.53},
    "alibi": {512: 23.87, 4096: 21.75, 8192: 22.46, 16384: 23.19, 65536: 22.84},
}


def main() -> bool:
    """The command."""
    parser = arguments("Perplexity by length for rotations.", encodings=list(ENCODINGS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row in training")
    parser.add_argument(
        "--lengths", type=numbers, default=[512, 2048, 4096, 8192, 16384, 65536], help="of rows to evaluate on"
    )
    parser.add_argument("--window", type=int, help="of the sliding evaluation; the length of training by default")
    parser.add_argument("--piece", type=int, help="read rows in pieces of so many tokens, where memory is short")
    return run(parser.parse_args())


def run(chosen: argparse.Namespace) -> bool:
    """Trains and evaluates every encoding; whether all are done."""
    plan = plan_of(chosen, max(chosen.lengths))
    window = chosen.window or chosen.length
    valid = open_corpus(chosen.data, "valid")
    runs = [Run(encoding, chosen.length) for encoding in chosen.encodings]
    settings = {"lengths": chosen.lengths, "window": window, "tokens": chosen.tokens}

    def evaluate(model: dr.DeadReckonForCausalLM, run: Run, say: Callable[[str], None]) -> dict[str, Any]:
        longer = [length for length in chosen.lengths if length > window]
        scores = perplexity_by_length(model, valid, chosen.lengths, tokens=chosen.tokens, piece=chosen.piece)
        if longer:
            scores += perplexity_by_length(model, valid, longer, tokens=chosen.tokens, window=window)
        for score in scores:
            sliding = "" if score.window is None else f", window of {window}"
            say(f"{score.length} tokens{sliding}: perplexity {score.perplexity:.2f}, end {score.last_perplexity:.2f}")
        return {"scores": [asdict(score) for score in scores]}

    done, found = compare(runs, plan, evaluate, settings, chosen.save, chosen.minutes)
    print(tabulate(found))
    return done


def tabulate(runs: list[dict[str, Any]]) -> str:
    """Perplexity of each run at each length, with a window too, and how many times the first the last is."""
    heads, rows = ["encoding"], []
    for run in runs:
        scores = run["scores"]
        titles = [f"{score['length']}" + ("" if score["window"] is None else ", window") for score in scores]
        whole = [score["perplexity"] for score in scores if score["window"] is None]
        heads = ["encoding", *titles, "last/first"]
        rows.append(
            [run["encoding"], *(f"{score['perplexity']:.2f}" for score in scores), f"{whole[-1] / whole[0]:.2f}×"]
        )
    return table(heads, rows)


if __name__ == "__main__":
    command(main)
