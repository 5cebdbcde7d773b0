"""Reports on conversions: the model card of one, and a page that compares several of one teacher.

`deadreckon convert` writes the card: teacher, start and student, with perplexity by context length, agreement in greedy
decoding, and speed. `deadreckon report` writes the page: losses by length before and after, and training cost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.environment import describe_environment, fingerprint, quiet_transformers
from deadreckon.lab.evaluation import Place, evaluate, format_value
from deadreckon.lab.files import write_text
from deadreckon.lab.pages.card import card, licence_of
from deadreckon.lab.pages.compare import draw_comparison, short_commit
from deadreckon.lab.pages.comparison import Comparison, Test, difference_unit, format_difference, paired_difference
from deadreckon.lab.pages.tables import by_length, image, markdown, save_markdown
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.conversion import STAGES, Conversion
from deadreckon.lab.training.conversion import convert_run, score_before
from deadreckon.lab.training.distillation import load_start, load_teacher
from deadreckon.lab.training.runs import Run

Texts = dict[int, Sequence[float]]  # losses by length, of the same texts
Course = list[tuple[int, float, float]]  # tokens, and after these the loss less the teacher's, with a standard error
PROMPTS, PROMPT, NEW = 8, 32, 32  # texts that both continue, tokens of a prompt, tokens that are added


def convert(conversion: Conversion, out: Path, device: str, console: Console) -> None:
    """Converts a model, evaluates teacher, start and student, and writes report.json and README.md beside the model.

    What has been measured is kept in measured.json: after an interruption, or with more models beside it, it goes on.
    """
    convert_run(conversion, out, device=device, console=console)
    report, written, beside = dict[str, Any](), dict[str, Tensor](), dict[str, Any]()
    with quiet_transformers(), console.status(f"measuring {out} and its teacher"):
        for name, folder in {"teacher": Path(conversion.source), "start": out / "start", "student": out}.items():
            if folder == out / "start" and not conversion.planned:
                continue  # it is the student
            load = load_teacher if name == "teacher" else load_start
            report[name] = measured_once(folder, load, conversion, out, device)
            written[name] = torch.tensor(report[name].pop("written"))
            if name == "teacher":  # as students are scored while they are trained
                before = score_before(conversion, out, device)[name]
                report[name]["at_length"] = {one.condition: one.texts for one in before}
        for one in conversion.beside:
            beside[one] = measured_once(Path(one), load_start, conversion, out, device) | {"tokens": tokens_of(one)}
            del beside[one]["written"]
    table, agreement = tabulate(report | beside), match(written["teacher"], written["student"])
    report |= {"same_tokens": agreement, "environment": describe_environment(device), "conversion": asdict(conversion)}
    report |= {"beside": beside}
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    write_text(out / "README.md", model_card(conversion, out, table, agreement, device))
    console.print(
        f"{table}\n\n{agreement:.0%} of greedily chosen tokens are the teacher's.", highlight=False, soft_wrap=True
    )
    console.print(f"Saved: {out}", highlight=False)


def measured_once(
    folder: Path, load: Callable[[str], Any], conversion: Conversion, out: Path, device: str
) -> dict[str, Any]:
    """What `measure` finds, and what the model writes: from measured.json if it is there, for the same weights."""
    path = out / "measured.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    of = {"recipe": conversion.test_recipe().to_dict(), "device": device, "weights": fingerprint(folder)}
    if kept.get(str(folder), {}).get("of") != of:
        model = load(str(folder)).to(device).eval()
        written, speed = continue_greedily(model, conversion.sample_tests(PROMPTS, PROMPT).to(device))
        found = measure(model, conversion) | {"writing": speed, "written": written.tolist()}
        kept[str(folder)] = {"of": of, "found": found}
        write_text(path, json.dumps(kept) + "\n")
    found = json.loads(json.dumps(kept[str(folder)]["found"]))  # lengths are text, as they are when it is read
    return dict(found)


def tokens_of(checkpoint: str | Path) -> int | None:
    """Training tokens of a run's checkpoint; None if unknown."""
    path = Path(checkpoint) / "progress.json"
    return int(json.loads(path.read_text())["tokens"]) if path.exists() else None


def continue_greedily(model: dr.DeadReckonForCausalLM, prompts: Tensor) -> tuple[Tensor, float]:
    """New tokens of a model after prompts (prompts, new), and tokens per second."""
    began = time.perf_counter()
    mask = torch.ones_like(prompts)
    tokens = model.generate(
        prompts, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    new = tokens[:, prompts.shape[1] :].cpu()  # which waits for the device
    return new, new.numel() / (time.perf_counter() - began)


def match(expected: Tensor, chosen: Tensor) -> float:
    """The share of tokens that come before the first mismatch in their row."""
    return float((expected == chosen).long().cumprod(1).double().mean())


def measure(model: dr.DeadReckonForCausalLM, conversion: Conversion) -> dict[str, Any]:
    """Perplexity and per-text losses by test and length, on the same texts for all models and lengths; and tokens per
    second of a forward pass."""
    recipe = conversion.test_recipe()
    rows = conversion.sample_tests(1, recipe.length).to(next(model.parameters()).device)
    perplexity, texts = ({name: dict[int, Any]() for name in recipe.conditions} for _ in range(2))
    for one in (score for score in evaluate(model, recipe) if score.condition in recipe.conditions):
        perplexity[one.condition][one.length], texts[one.condition][one.length] = one.perplexity, one.texts
    with torch.no_grad():
        model(rows)  # kernels are compiled
        began = time.perf_counter()
        float(model(rows).logits[0, -1, 0])
    return {"perplexity": perplexity, "texts": texts, "reading": rows.numel() / (time.perf_counter() - began)}


def tabulate(measured: dict[str, dict[str, Any]]) -> str:
    """Markdown table with a row for each model."""
    tested = measured["teacher"]["perplexity"]
    places = [(condition, length) for condition, by_length in tested.items() for length in by_length]
    rows = [
        [name, *(format_value("perplexity", one["perplexity"][condition][length]) for condition, length in places),
         f"{one['reading']:,.0f}", f"{one['writing']:,.0f}"]
        for name, one in measured.items()
    ]  # fmt: skip
    headings = [f"perplexity{named(condition, tested)} at {length}" for condition, length in places]
    return markdown(["", *headings, "tokens/s reading", "tokens/s writing"], rows)


def named(condition: str, conditions: Collection[str]) -> str:
    """The name of a test in brackets, if there are several."""
    return f" ({condition})" if len(conditions) > 1 else ""


def model_card(conversion: Conversion, out: Path, table: str, agreement: float, device: str) -> str:
    """The model card of a conversion, README.md."""
    runs = [Run(out / stage) for stage, _ in conversion.recipes(out)]
    stages = [
        [run.path.name, run.recipe.steps, f"{run.progress().tokens:,}", f"{run.recipe.learning_rate:g}"] for run in runs
    ]
    start = "a cold swap" if conversion.cold else "an exact start"
    prompts = PROMPTS * len(conversion.test_recipe().conditions)
    faded = ", while the angles of RoPE faded to nothing" if conversion.drop_rope else ""
    sections = {
        "": f"Converted from `{conversion.source}` to the position encoding `{conversion.ended}` with deadreckon, from "
        f"{start}{faded}.",
        "Stages": markdown(["stage", "steps", "tokens", "learning rate"], stages) if stages else "No training.",
        "Scores": f"Trained at {conversion.length} tokens; the same held-out text at every length:\n\n{table}\n\n"
        f"{agreement:.0%} of {prompts} × {NEW} greedily chosen tokens are the teacher's, each row up to the first that "
        "differs.",
    }
    held_out = f"; scored on `{conversion.held_out}`" if conversion.held_out else ""
    return card(
        f"{Path(conversion.source).name} with {conversion.ended}", sections, describe_environment(device),
        base=conversion.source, data=f"`{conversion.data}`{held_out}.", licence=licence_of(conversion.source),
    )  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """A finished conversion, read from its folder."""

    name: str
    report: dict[str, Any]
    runs: list[Run]

    @classmethod
    def read(cls, folder: Path) -> Converted:
        path = folder / "report.json"
        if not path.exists():
            raise ValueError(f"runs: expected folders of finished conversions, with report.json, got {str(folder)!r}")
        stages = [folder / stage for stage in STAGES if (folder / stage / "recipe.json").exists()]
        report = json.loads(path.read_text())
        if not isinstance(report["student"]["texts"], dict):
            raise ValueError(
                f"runs: expected losses by test in {str(path)!r}, got those of an older version; convert anew"
            )
        return cls(folder.name, report, [Run(stage) for stage in stages])

    def texts(self, model: str, condition: str) -> Texts:
        """Per-text losses of "teacher", "start" or "student" in a test; without stages, the start is the student."""
        return _by_length(self.report.get(model, self.report["student"]), condition)

    def courses(self, condition: str) -> dict[tuple[str, str], Course]:
        """The gap to the teacher during training, in a test, by name and stage."""
        spent, courses = 0, {}
        for run in self.runs:
            courses[self.name, run.path.name] = self._course(run, condition, spent)
            spent += run.progress().tokens
        return courses

    def courses_beside(self, condition: str) -> dict[tuple[str, str], Course]:
        """The same for the training runs of the teacher and of other models, if they were tested alike."""
        tests = {tests_of(run.recipe) for run in self.runs}
        alike = {name: run for name, run in self.trainings().items() if tests_of(run.recipe) in tests}
        return {(name, "training"): self._course(run, condition) for name, run in alike.items()}

    def trainings(self) -> dict[str, Run]:
        """The runs that the teacher and the models beside it are checkpoints of, if they exist."""
        folders = {"teacher": self.report["conversion"]["source"]} | {f"`{name}`": name for name in self.beside}
        runs = {name: Path(folder).parent for name, folder in folders.items()}
        return {name: Run(path) for name, path in runs.items() if (path / "recipe.json").exists()}

    def _course(self, run: Run, condition: str, spent: int = 0) -> Course:
        """The gap to the teacher by training tokens; empty without a last checkpoint, which has the tokens per step."""
        expected, progress = self.report["teacher"]["at_length"].get(condition, []), run.progress()
        course, place = [], (condition, self.length)
        for line in run.lines("evaluations") if progress.step else ():
            found = [one["texts"] for one in line["scores"] if (one["condition"], one["length"]) == place]
            if found and len(found[0]) == len(expected):
                tokens = spent + progress.tokens * line["step"] // progress.step
                course.append((tokens, *paired_difference(found, [expected])))
        return course

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Lengths of the final evaluation, by test."""
        return {condition: list(self.texts("teacher", condition)) for condition in self.report["teacher"]["texts"]}

    @property
    def beside(self) -> dict[str, Any]:
        """Other models that were evaluated, by folder."""
        return self.report.get("beside", {})

    @property
    def tokens(self) -> int:
        """Tokens that the student was trained on, in all stages."""
        return sum(run.progress().tokens for run in self.runs)

    @property
    def length(self) -> int:
        """The conversion's training length, which is taken for the teacher's."""
        return int(self.report["conversion"]["length"])


def _by_length(measured: dict[str, Any], condition: str) -> Texts:
    return {int(length): losses for length, losses in measured["texts"][condition].items()}


def tests_of(recipe: Recipe) -> tuple[object, ...]:
    """Whatever determines the texts that a model is evaluated on during training."""
    options = {name: recipe.options | changed for name, changed in recipe.conditions.items()}
    texts = [(name, one.get("data"), one.get("held_out", ""), one.get("part")) for name, one in options.items()]
    return *texts, recipe.test_lengths, recipe.test_tokens


def all_beside(conversions: Sequence[Converted]) -> dict[str, Any]:
    """Other models that were evaluated, each once."""
    return {folder: measured for one in conversions for folder, measured in one.beside.items()}


def write_conversions(path: Path, folders: Sequence[Path], console: Console) -> None:
    """Writes a Markdown page, and its picture beside it."""
    conversions = [Converted.read(folder) for folder in folders]
    lengths, first = conversions[0].lengths, conversions[0].report["environment"]
    if any(one.lengths != lengths for one in conversions):
        raise ValueError("runs: expected conversions with the same tests at the same lengths, got different ones")
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    seeds = dict.fromkeys(str(one.report["conversion"]["seed"]) for one in conversions)
    starts = [start for one in conversions for run in one.trainings().values() for start in run.starts()]
    starts += [one.report["environment"] for one in conversions]
    picture = draw_comparison(compared(conversions), path.with_suffix(".png"), console)
    parts = [
        "# Conversions",
        f"One RoPE teacher, trained at {conversions[0].length} tokens, and what it was converted to.",
        f"{first['date'][:10]}: {first['device']}; Python {first['python']}, {versions}; commit "
        f"{short_commit(first['commit'])}. Seed {', '.join(seeds)}.",
        "\n".join(dict.fromkeys(f"    {start['command']}" for start in starts)),
        *(part for condition in lengths for part in tables_of_test(conversions, condition)),
        "Training:", cost_table(conversions),
    ]  # fmt: skip
    save_markdown(path, [*parts, image("Loss by length", picture, path)] if picture is not None else parts)
    console.print(f"Page: {path}", highlight=False)


def compared(conversions: Sequence[Converted]) -> Comparison:
    """The scores in the picture: of the teacher, every student, and other models."""
    values: dict[str, dict[Place, list[float]]] = {}
    for condition in conversions[0].lengths:
        rows = {"teacher": conversions[0].texts("teacher", condition)}
        rows |= {one.name: one.texts("student", condition) for one in conversions}
        for name, other in all_beside(conversions).items():
            rows["/".join(Path(name).parts[-2:])] = _by_length(other, condition)
        for name, texts in rows.items():
            values.setdefault(name, {}).update({(condition, n): [mean(losses)] for n, losses in texts.items()})
    recipe = Recipe(length=conversions[0].length, conditions={condition: {} for condition in conversions[0].lengths})
    tests = dict.fromkeys(conversions[0].lengths, Test("loss", "length", conversions[0].length))
    return Comparison("Conversions", recipe, values, tests)


def tables_of_test(conversions: Sequence[Converted], condition: str) -> list[str]:
    """The page's tables of a test: final losses, their difference to the teacher's, and that gap during training."""
    teacher = conversions[0].texts("teacher", condition)
    texts, which = len(next(iter(teacher.values()))), named(condition, conversions[0].lengths)
    on = f"the same {texts} held-out texts" if texts > 1 else "one held-out text"
    parts = [
        f"Loss by length on {on}{which}, nats:", loss_table(conversions, condition),
        f"Loss at the end less the teacher's on the same tokens{which}, {difference_unit(texts)}:",
        difference_table(conversions, condition),
    ]  # fmt: skip
    if rows := course_rows(conversions, condition):
        about = f"Loss at {conversions[0].length} less the teacher's on the same tokens{which}, nats, by tokens spent:"
        headings = ["", "stage", "evaluations", "the most", "first", "a quarter", "half", "three quarters", "last"]
        parts += [about, markdown(headings, rows, left=2)]
    return parts


def loss_table(conversions: Sequence[Converted], condition: str) -> str:
    """Losses: a row for the teacher, two for each conversion (start and end), and one for each other model."""

    teacher, rows = conversions[0].texts("teacher", condition), list[list[object]]()

    def add(name: str, tokens: int | None, texts: Texts) -> None:
        losses = (format_value("loss", mean(texts[length])) for length in teacher)
        rows.append([name, "" if tokens is None else f"{tokens:,}", *losses])

    add("teacher", tokens_of(conversions[0].report["conversion"]["source"]), teacher)
    for one in conversions:
        add(f"{one.name}, start", 0, one.texts("start", condition))
        if one.runs:
            add(f"{one.name}, end", one.tokens, one.texts("student", condition))
    for name, other in all_beside(conversions).items():
        add(f"`{name}`", other["tokens"], _by_length(other, condition))
    return markdown(["", "tokens", *teacher], rows)


def difference_table(conversions: Sequence[Converted], condition: str) -> str:
    """Differences to the teacher: a row for each conversion and each other model."""
    ends = {one.name: one.texts("student", condition) for one in conversions}
    ends |= {f"`{name}`": _by_length(measured, condition) for name, measured in all_beside(conversions).items()}
    teacher, rows = conversions[0].texts("teacher", condition), dict[str, dict[int, str]]()
    for name, texts in ends.items():
        pairs = {n: paired_difference([losses], [teacher[n]]) for n, losses in texts.items()}
        rows[name] = {n: format_difference(*pair) for n, pair in pairs.items()}
    return markdown(*by_length(rows))


def course_rows(conversions: Sequence[Converted], condition: str) -> list[list[object]]:
    """Rows on the gap to the teacher during training, of models for which it was recorded."""
    courses = {names: course for one in conversions for names, course in one.courses_beside(condition).items()}
    courses |= {names: course for one in conversions for names, course in one.courses(condition).items()}
    rows: list[list[object]] = []
    for names, course in courses.items():
        if not course:
            continue
        quarters = [course[round(part * (len(course) - 1) / 4)] for part in range(5)]
        tokens, most, error = max(course, key=lambda each: each[1])
        rows.append([
            *names, len(course), f"{format_difference(most, error)} at {tokens:,}",
            *(f"{mean:+.4f} at {tokens:,}" for tokens, mean, _ in quarters),
        ])  # fmt: skip
    return rows


def cost_table(conversions: Sequence[Converted]) -> str:
    """Stages with steps, tokens, lengths and learning rates, and agreement with the teacher in greedy decoding."""
    rows = []
    for one in conversions:
        for run in one.runs:
            recipe, progress = run.recipe, run.progress()
            rows.append([
                one.name, run.path.name, recipe.steps, f"{progress.tokens:,}", f"{recipe.length}",
                f"{recipe.learning_rate:g}", f"{one.report['same_tokens']:.0%}",
            ])  # fmt: skip
    headings = ["", "stage", "steps", "tokens", "length", "learning rate", "greedy tokens like the teacher"]
    return markdown(headings, rows, left=2)
