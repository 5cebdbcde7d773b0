"""Probes the model of a folder.

python -m deadreckon.lab.probe MODEL_FOLDER --data flip-flop --length 512 --trained 128 --out probe
python -m deadreckon.lab.probe MODEL_FOLDER --data novel.txt --length 4096 --rows 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.environment import check_device, check_model
from deadreckon.lab.probe.probe import run_probe
from deadreckon.lab.probe.report import print_findings
from deadreckon.tasks import TASKS


def read_data(data: str, folder: Path, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Rows of a task, with its labels, or stretches of a text, spread over it, without.

    Args:
        data: a name in TASKS, or a text file, which the tokenizer of the folder reads.
        length: of a task's rows in its own measure, of a text's in tokens.
    """
    if rows < 1:
        raise ValueError(f"rows: expected 1 or more, got {rows}")
    if data in TASKS:
        return TASKS[data]().sample(rows, length, torch.Generator().manual_seed(seed))
    if not Path(data).is_file():
        raise ValueError(f"data: expected a text file or one of {', '.join(TASKS)}; got {data!r}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: expected a tokenizer in {str(folder)!r} to read a text with, found none") from error
    ids = torch.tensor(tokenizer(Path(data).read_text())["input_ids"])
    if len(ids) < rows * length:
        raise ValueError(f"data: expected {rows} × {length} tokens or more in {data!r}, got {len(ids)}")
    starts = [row * (len(ids) // rows) for row in range(rows)]
    return torch.stack([ids[start : start + length] for start in starts]), None


def main() -> None:
    """Reads, probes, prints, and saves if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder, as save_pretrained writes it")
    parser.add_argument("--data", required=True, help="a text file, or a task")
    parser.add_argument("--length", type=int, default=1024, help="of each row")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--trained", type=int, help="length the model was trained at, in tokens")
    parser.add_argument("--window", type=int, help="tokens after which a token is far; each head's own by default")
    parser.add_argument("--queries", type=int, default=32, help="looked at in each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for probe.json and probe.png")
    chosen = parser.parse_args()
    try:
        check_device(chosen.device)
        check_model(chosen.model)
        tokens, labels = read_data(chosen.data, chosen.model, chosen.rows, chosen.length, chosen.seed)
        model = dr.DeadReckonForCausalLM.from_pretrained(chosen.model).to(chosen.device)
        found = run_probe(
            model, tokens, chosen.out, labels=labels, trained=chosen.trained, window=chosen.window,
            queries=chosen.queries, seed=chosen.seed,
        )  # fmt: skip
    except ValueError as error:
        Console(stderr=True).print(f"[red]error[/]: {error}", highlight=False)
        sys.exit(2)
    print_findings(found, Console())
    if chosen.out is not None:
        Console().print(f"Saved: {chosen.out / 'probe.json'}" + (f", {chosen.out / 'probe.png'}" * bool(found.heads)))


if __name__ == "__main__":
    main()
