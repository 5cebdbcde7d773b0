"""Small language models trained alike and compared: what `rotation_table` and `power_figures` share.

They run where there is torch, transformers and numpy alone, on a folder of tokens that is made elsewhere:

    python -m deadreckon.lab.text_runs books-train.jsonl.xz books-valid.jsonl.xz --save books

Results are one JSON file, written after every run; a command given again goes on behind the runs that are in it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.recipe import Recipe
from deadreckon.lab.training import Training, make_model
from deadreckon.tasks.language import Language, load_corpus, open_corpus, save_corpora
from deadreckon.tasks.tokens import writing

SIZES = {  # width, layers, heads; parameters with 8192 tokens
    "tiny": (64, 2, 1),  # 1.1 M
    "mini": (256, 6, 4),  # 9 M
    "small": (384, 8, 6),  # 20 M
    "medium": (512, 8, 8),  # 34 M
}
LATE = 10  # steps, after which losses are read


@dataclass(frozen=True)
class Plan:
    """What all runs of a comparison have in common. AdamW, a linear warm-up, then a cosine down to a tenth."""

    data: str
    size: str = "small"
    steps: int = 1500
    batch_tokens: int = 1 << 15
    learning_rate: float = 1e-3
    seed: int = 0
    longest: int = 65536  # document, for encodings that scale their angles by it
    packed: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size: expected one of {', '.join(SIZES)}; got {self.size!r}")
        for name in ("steps", "batch_tokens", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Run:
    """One of the models that are compared."""

    encoding: str
    length: int  # tokens of a row in training
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.encoding, *(f"{key}={value}" for key, value in self.options), f"at {self.length}"])


def recipe_of(run: Run, plan: Plan) -> Recipe:
    """How a run is trained: as many tokens a step at any length."""
    width, layers, heads = SIZES[plan.size]
    return Recipe(
        task="language", length=run.length, batch_size=max(1, plan.batch_tokens // run.length), encoding=run.encoding,
        encoding_options=dict(run.options), layers=layers, width=width, heads=heads, initial=0.02, longest=plan.longest,
        steps=plan.steps, learning_rate=plan.learning_rate, betas=(0.9, 0.95), warmup=max(1, plan.steps // 20),
        schedule="cosine", floor=0.1, seed=plan.seed, metric="perplexity",
    )  # fmt: skip


class OutOfTimeError(Exception):
    """The time that was given is over."""


def train(training: Training, say: Callable[[str], None], deadline: float) -> list[float]:
    """Trains to the end; the loss of every step."""
    steps = training.recipe.steps
    losses, waiting = list[float](), list[Tensor]()
    spoken = max(1, steps // 100) * LATE  # ten times, in a long training
    began, tokens = time.perf_counter(), 0
    while training.done < steps:
        step = training.advance()
        waiting.append(step.losses)
        tokens += step.tokens
        if step.number % LATE == 0 or step.number == steps:  # to read a loss is to wait for the GPU
            losses += torch.stack(waiting).tolist()
            waiting = []
            if time.monotonic() > deadline:
                raise OutOfTimeError
        if step.number % spoken == 0:
            speed = tokens / (time.perf_counter() - began)
            say(f"step {step.number}: loss {mean_of_last(losses, LATE):.4f}, {speed:.0f} tokens/s")
    return losses


def mean_of_last(losses: Sequence[float], count: int) -> float:
    """The mean over the last so many steps."""
    return sum(losses[-count:]) / len(losses[-count:])


def curve(losses: Sequence[float], points: int = 100) -> list[tuple[int, float]]:
    """Steps, and the mean loss since the one before."""
    span = -(-len(losses) // points)
    stops = [*range(span, len(losses), span), len(losses)]
    return [
        (stop, mean_of_last(losses[:stop], stop - before)) for before, stop in zip([0, *stops], stops, strict=False)
    ]


@dataclass
class Results:
    """A JSON file of runs by name, all of one plan."""

    path: Path
    settings: dict[str, Any]
    runs: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> Results:
        """Those in the file, if there is one and it is of the same plan."""
        settings = json.loads(json.dumps(settings))  # as they will be read again
        if not path.exists():
            return cls(path, settings, {})
        try:
            found = json.loads(path.read_text())
            known, runs = found["settings"], found["runs"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"save: expected a file of results, or none, got {path}") from error
        other = {name for name in {*known, *settings} if known.get(name) != settings.get(name)}
        if other:
            raise ValueError(f"save: expected results of the same settings, got other {sorted(other)} in {path}")
        return cls(path, settings, runs)

    def add(self, name: str, found: dict[str, Any]) -> None:
        """One run more, in the file as well."""
        self.runs[name] = found
        with writing(self.path) as unfinished:
            unfinished.write_text(json.dumps({"settings": self.settings, "runs": self.runs}, indent=1) + "\n")


Evaluate = Callable[[dr.DeadReckonForCausalLM, Run, Callable[[str], None]], dict[str, Any]]


def compare(
    runs: Iterable[Run], plan: Plan, evaluate: Evaluate, settings: dict[str, Any], save: Path, minutes: float | None
) -> tuple[bool, list[dict[str, Any]]]:
    """Trains and evaluates the runs that the file does not have yet.

    Args:
        evaluate: what is to be known of a trained model, as plain data.
        settings: of the evaluation, kept beside the plan.
        minutes: no training goes on for longer, and no run is begun that would not be finished by then if it took as
            long as the longest yet; those that are left are named.

    Returns:
        Whether all runs are in the file, and those of them that are.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    results = Results.open(save, asdict(plan) | settings)
    task = Language(open_corpus(plan.data, "train"), plan.packed)
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    runs = list(runs)
    left = [run for run in runs if run.name not in results.runs]
    longest = max((sum(found["seconds"]) for found in results.runs.values()), default=0.0)
    while left:
        run, began = left[0], time.monotonic()
        if began + longest > deadline:
            break

        def say(line: str, name: str = run.name) -> None:
            print(f"{name}: {line}", flush=True)

        recipe = recipe_of(run, plan)
        model = make_model(recipe, task.vocab_size).to(device)
        try:
            losses = train(Training(model, task, recipe), say, deadline)
        except OutOfTimeError:
            break
        trained = time.monotonic()
        found = {
            **asdict(run), "parameters": model.num_parameters(), "curve": curve(losses),
            "loss": mean_of_last(losses, max(1, plan.steps // 10)),  # over the last tenth of training
            **evaluate(model, run, say), "seconds": [trained - began, time.monotonic() - trained],
            "date": time.strftime("%Y-%m-%d"), "device": where,
            "versions": {"torch": torch.__version__, "deadreckon": dr.__version__},
        }  # fmt: skip
        results.add(run.name, found)
        longest = max(longest, time.monotonic() - began)
        del left[0]
    if left:
        print(f"out of time; give the command again for: {', '.join(run.name for run in left)}", flush=True)
    return not left, [results.runs[run.name] for run in runs if run.name in results.runs]


def arguments(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """What both commands take; their own options come on top."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that `python -m deadreckon.lab.text_runs` has made")
    parser.add_argument("--encodings", type=names, help="names, separated by commas")
    parser.add_argument("--size", choices=SIZES, default=Plan.size, help="of the models")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="of training")
    parser.add_argument("--batch-tokens", type=int, default=Plan.batch_tokens, help="of a step")
    parser.add_argument("--learning-rate", type=float, default=Plan.learning_rate, help="the greatest")
    parser.add_argument("--seed", type=int, default=Plan.seed, help="of weights and data")
    parser.add_argument("--packed", action="store_true", help="documents do not see each other in training")
    parser.add_argument("--tokens", type=int, default=1 << 19, help="foretold in each evaluation, about")
    parser.add_argument("--minutes", type=float, help="stop after about so many; give the command again to go on")
    parser.add_argument("--save", type=Path, required=True, help="JSON file of the results")
    parser.set_defaults(**defaults)
    return parser


def plan_of(chosen: argparse.Namespace, longest: int) -> Plan:
    """The plan that the options say."""
    return Plan(
        chosen.data, chosen.size, chosen.steps, chosen.batch_tokens, chosen.learning_rate, chosen.seed, longest,
        chosen.packed,
    )  # fmt: skip


def names(text: str) -> list[str]:
    """What commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    """Whole numbers that commas separate."""
    return [int(number) for number in names(text)]


def command(main: Callable[[], bool]) -> None:
    """Runs a command; a user's mistake is one line, and an unfinished comparison exits with 3."""
    try:
        sys.exit(0 if main() else 3)
    except ValueError as error:
        sys.exit(f"error: {error}")


def prepare() -> bool:
    """Makes the folder of tokens."""
    parser = argparse.ArgumentParser(
        prog="python -m deadreckon.lab.text_runs", description="Make a folder of tokens to train on, and a tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("train", help="text to train on: a file, a folder or hf:NAME")
    parser.add_argument("valid", help="text to evaluate on")
    parser.add_argument("--save", type=Path, required=True, help="folder to make")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of the tokenizer")
    parser.add_argument("--most", type=int, help="keep so many tokens of the text to train on, at most")
    chosen = parser.parse_args()
    train = load_corpus(chosen.train, vocabulary=chosen.vocabulary)
    valid = load_corpus(chosen.valid, tokenizer=train.tokenizer)
    size = save_corpora(
        chosen.save, {"train": train, "valid": valid}, {} if chosen.most is None else {"train": chosen.most}
    )
    kept = len(open_corpus(chosen.save, "train").ids)
    print(f"{chosen.save}: {kept} tokens to train on, {len(valid.ids)} to evaluate on, {size / 2**20:.1f} MiB")
    return True


if __name__ == "__main__":
    command(prepare)
