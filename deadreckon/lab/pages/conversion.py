"""What a conversion came to: teacher, start and student by length, in generation and in speed, as a model card."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.environment import describe_environment
from deadreckon.lab.evaluation import evaluate, format_value
from deadreckon.lab.files import write_text
from deadreckon.lab.pages.card import card, licence_of
from deadreckon.lab.pages.tables import markdown
from deadreckon.lab.recipes.conversion import Conversion
from deadreckon.lab.training.conversion import convert_run
from deadreckon.lab.training.distillation import load_start, load_teacher
from deadreckon.lab.training.runs import Run
from deadreckon.lab.training.trainer import quiet_transformers

PROMPTS, PROMPT, NEW = 8, 32, 32  # texts that both continue, tokens of a prompt, tokens that are added


@dataclass(frozen=True)
class Measured:
    """One of the models."""

    perplexity: dict[int, float]  # by length
    texts: dict[int, Sequence[float]]  # losses on texts that are the same for all models and lengths
    reading: float  # tokens per second of a text of the training length
    writing: float  # tokens per second of generate()


def convert(conversion: Conversion, out: Path, device: str, console: Console) -> None:
    """Converts, measures teacher, start and student, and writes report.json and README.md beside the model."""
    convert_run(conversion, out, device=device, console=console)
    measured, written = {}, {}
    with quiet_transformers(), console.status(f"measuring {out} and its teacher"):
        prompts = draw_prompts(conversion).to(device)
        for name, folder in {"teacher": conversion.source, "start": out / "start", "student": out}.items():
            if folder == out / "start" and not conversion.planned:
                continue  # it is the student
            model = (load_teacher if name == "teacher" else load_start)(str(folder)).to(device).eval()
            written[name], speed = continue_greedily(model, prompts)
            measured[name] = measure(model, conversion, speed)
    agreement = match(written["teacher"], written["student"])
    report: dict[str, Any] = {name: asdict(one) for name, one in measured.items()}
    report |= {"same_tokens": agreement, "environment": describe_environment(device), "conversion": asdict(conversion)}
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    table = tabulate(measured)
    write_text(out / "README.md", model_card(conversion, out, table, agreement, device))
    console.print(
        f"{table}\n\n{agreement:.0%} of greedily chosen tokens are the teacher's.", highlight=False, soft_wrap=True
    )
    console.print(f"Saved: {out}", highlight=False)


def draw_prompts(conversion: Conversion) -> Tensor:
    """Beginnings of texts (prompts, tokens), from the held-out ones."""
    task = conversion.test_recipe().make_task("held out")
    return task.sample(PROMPTS, PROMPT, torch.Generator().manual_seed(0))[0]


def continue_greedily(model: dr.DeadReckonForCausalLM, prompts: Tensor) -> tuple[Tensor, float]:
    """What a model adds to prompts (prompts, new), and tokens per second."""
    began = time.perf_counter()
    mask = torch.ones_like(prompts)
    tokens = model.generate(
        prompts, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    new = tokens[:, prompts.shape[1] :].cpu()  # which waits for the device
    return new, new.numel() / (time.perf_counter() - began)


def match(expected: Tensor, found: Tensor) -> float:
    """The share of tokens up to and without the first that differs in each row."""
    return float((expected == found).long().cumprod(1).double().mean())


def measure(model: dr.DeadReckonForCausalLM, conversion: Conversion, writing: float) -> Measured:
    recipe = conversion.test_recipe()
    scores = {one.length: one for one in evaluate(model, recipe)}
    rows, _ = recipe.make_task("held out").sample(1, recipe.length, torch.Generator().manual_seed(0))
    rows = rows.to(next(model.parameters()).device)
    with torch.no_grad():
        model(rows)  # kernels are compiled
        began = time.perf_counter()
        float(model(rows).logits[0, -1, 0])
    reading = rows.numel() / (time.perf_counter() - began)
    perplexity = {length: one.perplexity for length, one in scores.items()}
    return Measured(perplexity, {length: one.texts for length, one in scores.items()}, reading, writing)


def tabulate(measured: dict[str, Measured]) -> str:
    """In Markdown: a row for each model."""
    lengths = list(measured["teacher"].perplexity)
    rows = [
        [name, *(format_value("perplexity", one.perplexity[length]) for length in lengths), f"{one.reading:,.0f}",
         f"{one.writing:,.0f}"]
        for name, one in measured.items()
    ]  # fmt: skip
    return markdown(["", *(f"perplexity at {n}" for n in lengths), "tokens/s reading", "tokens/s writing"], rows)


def model_card(conversion: Conversion, out: Path, table: str, agreement: float, device: str) -> str:
    """README.md, as the Hugging Face Hub shows it."""
    runs = [Run(out / stage) for stage, _ in conversion.recipes(out)]
    stages = [
        [run.path.name, run.recipe.steps, f"{run.progress().tokens:,}", f"{run.recipe.learning_rate:g}"] for run in runs
    ]
    start = "a cold swap" if conversion.cold else "an exact start"
    faded = ", while the angles of RoPE faded to nothing" if conversion.drop_rope else ""
    sections = {
        "": f"Converted from `{conversion.source}` to the position encoding `{conversion.ended}` with deadreckon, from "
        f"{start}{faded}.",
        "Stages": markdown(["stage", "steps", "tokens", "learning rate"], stages) if stages else "No training.",
        "Scores": f"Trained at {conversion.length} tokens; the same held-out text at every length:\n\n{table}\n\n"
        f"{agreement:.0%} of {PROMPTS} × {NEW} greedily chosen tokens are the teacher's, each row up to the first that "
        "differs.",
    }
    held_out = f"; scored on `{conversion.held_out}`" if conversion.held_out else ""
    return card(
        f"{Path(conversion.source).name} with {conversion.ended}", sections, describe_environment(device),
        base=conversion.source, data=f"`{conversion.data}`{held_out}.", licence=licence_of(conversion.source),
    )  # fmt: skip
