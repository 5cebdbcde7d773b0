"""Model cards: README.md in the Hugging Face Hub's format, beside weights, from all commands that save models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from deadreckon.lab.evaluation import SHARES, Place, Score, format_value
from deadreckon.lab.files import write_text
from deadreckon.lab.pages.tables import by_length, markdown
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training.runs import KINDS, Run

LOADING = """```python
from transformers import AutoModelForCausalLM

# runs one line that imports deadreckon, which must be installed, with its extra `models`
model = AutoModelForCausalLM.from_pretrained("THIS FOLDER", trust_remote_code=True)
```"""
UNKNOWN = "unknown"  # the Hub's word for a licence that nobody has stated


def card(
    title: str,
    sections: Mapping[str, str],
    environment: Mapping[str, Any],
    *,
    base: str = "",
    data: str = "",
    licence: str = UNKNOWN,
) -> str:
    """The text of a model card.

    Args:
        title: of the page.
        sections: Markdown by heading; the first is printed without its heading.
        environment: from `describe_environment`: date, command, device, versions, commit.
        base: the model that this one was made from.
        data: description of the training data, for its section.
        licence: of the weights, an identifier of the Hub.
    """
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [deadreckon]"]
    front += [f"license: {licence}", *([f"base_model: {base}"] if base else []), "---"]
    (_, about), *others = sections.items()
    stated = " No licence of these weights has been stated; say one above to publish." if licence == UNKNOWN else ""
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    commit = f", commit {environment['commit']}" if environment["commit"] else ""
    parts = [
        "\n".join(front), f"# {title}", about, *(part for name, text in others for part in (f"## {name}", text)),
        *(["## Data", data + stated] if data else filter(None, [stated.strip()])),
        "## Loading", LOADING, "## How it was made", f"    {environment['command']}",
        f"{environment['date'][:10]}, {environment['device']}, Python {environment['python']}, {versions}{commit}.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def licence_of(model: str) -> str:
    """The licence that a saved model's card states, else UNKNOWN."""
    path = Path(model) / "README.md"
    front = path.read_text().split("---\n")[1:2] if model and path.exists() else []
    stated = re.search(r"^license: *(\S+)", "".join(front), re.MULTILINE)
    return stated.group(1) if stated else UNKNOWN


def write_cards(run: Run) -> None:
    """Writes the model card of each checkpoint of a run, after training and scoring."""
    for kind in KINDS:
        if (run.path / kind / "config.json").exists():
            write_text(run.path / kind / "README.md", run_card(run, kind))


def run_card(run: Run, kind: str = "last") -> str:
    """The model card of a checkpoint, from the run's recipe, progress and scores."""
    recipe, progress = run.recipe, run.progress()
    which = "the last checkpoint" if kind == "last" else f"the best checkpoint by {recipe.metric}"
    about = (
        f"A causal language model with the position encoding `{recipe.encoding}`, trained on `{recipe.task}` with "
        f"deadreckon for {progress.step:,} of {recipe.steps:,} steps and {progress.tokens:,} tokens: {which}, "
        f"of step {run.step(kind):,}."
    )
    scores = scores_table(recipe, run.scores(kind)) or "Not scored."
    sections = {"": about, "Scores": scores, "Recipe": f"```json\n{json.dumps(settings(recipe), indent=1)}\n```"}
    options = f", options {json.dumps(recipe.options)}" if recipe.options else ""
    data = f"The task `{recipe.task}`{options}; sequences of {recipe.length} tokens, seed {recipe.seed}."
    title, environment = f"{recipe.task} with {recipe.encoding}", run.starts()[-1]
    return card(title, sections, environment, base=recipe.start, data=data, licence=licence_of(recipe.start))


def settings(recipe: Recipe) -> dict[str, Any]:
    """Fields of a recipe that differ from their defaults, and always the most important ones."""
    asked, plain = recipe.to_dict(), Recipe(task=recipe.task).to_dict()
    always = ("task", "encoding", "layers", "width", "heads", "steps", "batch_size", "length", "learning_rate", "seed")
    names = [one.name for one in fields(recipe) if one.name in asked]
    return {name: asked[name] for name in names if name in always or asked[name] != plain.get(name)}


def scores_table(recipe: Recipe, scores: Mapping[Place, Score]) -> str:
    """Markdown table of scores: a row for each test, by length."""
    rows: dict[str, dict[int, str]] = {}
    for one in scores.values():
        measure = one.measure or recipe.metric
        unit = ", %" if measure in SHARES else ""
        rows.setdefault(f"{one.condition}: {measure}{unit}", {})[one.length] = format_value(measure, one.value(measure))
    return markdown(*by_length(rows)) if rows else ""
