"""`deadreckon eval MODEL --suite long`: generates answers, then prints, plots and saves scores by task and length."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import deadreckon as dr
from deadreckon.lab.arguments import check_counts
from deadreckon.lab.environment import check_device, check_model, describe_environment, fingerprint, quiet_transformers
from deadreckon.lab.evaluation.long import Answer, Answers, ask, read_answers
from deadreckon.lab.files import write_text
from deadreckon.lab.pages.pictures import suite_picture
from deadreckon.lab.pages.tables import by_length, image, markdown, save_markdown, terminal
from deadreckon.lab.recipes.texts import tokenizer_beside
from deadreckon.lab.training import Run
from deadreckon.lab.training.display import Countdown
from deadreckon.tasks.long import make_long_tasks

LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)
FOLDER = "long"
MEAN = "mean"
Scores = dict[str, dict[int, float]]  # by task and length, from 0 to 1


def run_suite(
    folder: Path,
    lengths: Sequence[int] = (),
    *,
    tasks: Sequence[str] = (),
    rows: int = 100,
    babi: str = "",
    books: str = "",
    checkpoint: str = "last",
    seed: int = 0,
    batch_tokens: int = 1 << 16,
    out: Path | None = None,
    sharpen_beyond: int | None = None,
    beside: Sequence[Path] = (),
    device: str = "cpu",
    console: Console | None = None,
) -> Scores:
    """Scores of a model in the long-context suite; answers that are in `out` already are not generated again.

    Arguments are those of the command, `deadreckon.lab.cli.Eval`.
    """
    console = console or Console()
    check_device(device)
    check_counts(rows=rows, batch_tokens=batch_tokens)
    dr.DeadReckonConfig(sharpen_beyond=sharpen_beyond)  # which says if it cannot be, before anything is written
    lengths = tuple(lengths) or LENGTHS
    chosen = make_long_tasks(tasks, babi=babi, books=books)
    name, *names = _names([folder, *beside])
    data = [Path(path).name for path in (babi, books) if path]
    questions: dict[str, Any] = {"seed": seed, "data": data}
    others = {
        other: [
            answer
            for answer in read_answers(_answers_file(path), questions)
            if answer.task in chosen and answer.length in lengths and answer.number < rows
        ]
        for other, path in zip(names, beside, strict=True)
    }
    sharpened = "" if sharpen_beyond is None else f" beyond {sharpen_beyond}"
    source, out = find_model(folder, checkpoint), out or folder / (FOLDER + sharpened.replace(" ", "-"))
    answers = Answers(out / "answers.jsonl", {"weights": fingerprint(source) + sharpened} | questions)
    keys = [(task, length, number) for task in chosen for length in lengths for number in range(rows)]
    countdown = Countdown(console, len(keys), sum(key in answers.known for key in keys))
    if countdown.done:
        console.print(f"{countdown.done} of {countdown.wanted} answers are there already.", highlight=False)
    if countdown.done < countdown.wanted:
        with quiet_transformers():
            model, tokenizer = load(folder, checkpoint, device, lengths, sharpen_beyond)
        with console.status("") as status:
            for batch in ask(
                model, tokenizer, chosen, lengths, rows, known=answers.known.keys(), seed=seed,
                batch_tokens=batch_tokens,
            ):  # fmt: skip
                answers.add(batch)
                status.update(countdown.advance(len(batch), f"{batch[-1].task} at {batch[-1].length}", "answers"))
    asked = [answers.known[key] for key in keys]
    show({name + sharpened: asked} | others, out, console, describe_environment(device)["command"])
    return mean_scores(asked)


def find_model(folder: Path, checkpoint: str) -> Path:
    """The folder of the weights: a run's checkpoint, or that of a saved model itself."""
    source = Run(folder).checkpoint(checkpoint) if (folder / "recipe.json").exists() else folder
    check_model(source, ours=False)
    return source


def load(
    folder: Path, checkpoint: str, device: str, lengths: Sequence[int], sharpen_beyond: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a run's checkpoint or a saved model of any kind, with its tokenizer."""
    source = find_model(folder, checkpoint)
    tokenizer = tokenizer_beside(source)
    if source != folder:
        return Run(folder).load(checkpoint, device, lengths, sharpen_beyond), tokenizer
    AutoModelForCausalLM.register(dr.DeadReckonConfig, dr.DeadReckonForCausalLM, exist_ok=True)
    config = AutoConfig.from_pretrained(folder)
    if sharpen_beyond is not None:
        if not isinstance(config, dr.DeadReckonConfig):
            raise ValueError(f"sharpen_beyond: expected a model of deadreckon, got {config.model_type}")
        config.sharpen_beyond = sharpen_beyond
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto").to(device).eval(), tokenizer


def mean_scores(answers: Iterable[Answer], averaged: Collection[str] | None = None) -> Scores:
    """Mean scores by task and length; with several tasks, their mean comes last.

    Args:
        averaged: tasks to average over, in place of all.
    """
    groups: dict[str, dict[int, list[float]]] = {}
    for answer in answers:
        groups.setdefault(answer.task, {}).setdefault(answer.length, []).append(answer.score)
    scores = {task: {n: mean(group[n]) for n in sorted(group)} for task, group in groups.items()}
    counted = [by_length for task, by_length in scores.items() if averaged is None or task in averaged]
    if len(counted) > 1:
        shared = sorted(set.intersection(*map(set, counted)))
        scores[MEAN] = {length: mean(by_length[length] for by_length in counted) for length in shared}
    return scores


def show(asked: dict[str, list[Answer]], out: Path, console: Console, command: str) -> None:
    """Prints a table for each model, and saves tables, picture and scores to the folder."""
    shared = set.intersection(*({answer.task for answer in answers} for answers in asked.values()))
    scores = {name: mean_scores(answers, shared) for name, answers in asked.items()}
    parts = ["# Long-context suite", "Scores in % by length in tokens, answered by generation.", f"    {command}"]
    for name, by_task in scores.items():
        cells = {task: {n: f"{100 * score:.1f}" for n, score in scored.items()} for task, scored in by_task.items()}
        headings, rows = by_length(cells, "task")
        console.print(terminal(headings, rows, title=f"{name}, scores in %"))
        parts += [f"{name}:", markdown(headings, rows)]
    page, picture = out / "suite.md", out / "suite.png"
    suite_picture(scores, {name: depths(answers) for name, answers in asked.items()}, picture)
    save_markdown(page, [*parts, image("Scores by length", picture, page)])
    write_text(out / "scores.json", json.dumps(scores, indent=1))
    console.print(f"Saved: {out}{os.sep}suite.md, suite.png, scores.json, answers.jsonl", highlight=False)


def depths(answers: Iterable[Answer]) -> dict[float, dict[int, float]]:
    """Mean scores in passkey, by depth and length."""
    groups: dict[float, dict[int, list[float]]] = {}
    for answer in answers:
        if answer.task == "passkey" and answer.depth is not None:
            groups.setdefault(answer.depth, {}).setdefault(answer.length, []).append(answer.score)
    return {depth: {n: mean(values) for n, values in groups[depth].items()} for depth in sorted(groups)}


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of models: their folders, with as many parent folders as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"beside: expected other models, each once, got {', '.join(map(str, folders))}")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(paths):
            break
    return names


def _answers_file(folder: Path) -> Path:
    """The file of answers in a model's folder, or in a folder that answers were written to."""
    inside = folder / FOLDER / "answers.jsonl"
    return inside if inside.exists() else folder / "answers.jsonl"
