"""PRISM's tasks: train on short sequences, score exact matches at longer ones, beside the paper's baseline.

    python -m deadreckon.lab.prism --task copy --encoding prism sinusoidal --device cuda --save results/copy
    python -m deadreckon.lab.prism --draw results/copy
    python -m deadreckon.lab.prism --score results/copy/prism-0 --task copy --lengths 200 400
    python -m deadreckon.lab.prism --show results/copy/prism-0 --input 12345

Sizes are the paper's: five layers of eight heads, tied embeddings, width 192 with PRISM and 512 with the baseline, the
sinusoids of which begin at a random position in training; 140 cursors there, 160 here, four to each head. The copy
branch and a second module are used where the paper does. It trains 150 000 steps at a rate of 9e-5; the defaults here
take a few minutes on one GPU, with a higher rate and its curriculum at a faster pace. So that cursors tell positions
apart from the beginning, α begins with 20: of that the paper says nothing, and its training lets it grow. Cursors have
as many positions as rows may need: fewer in training than in tests, since no weight depends on their number.

What a model knows of longer sequences is up to how sure its cursors are. `--noise` makes them decide. Where content
alone leads to an answer they are not needed and never come to count; with a small `--content` and a `--gamma` near 1
they do: see `results/prism-reverse.md` and `results/prism-addition.md`.

Results are written as they come, one file an encoding and seed. What is reported is, for each length, the mean of the
three best evaluations in a training, as in the paper: best, not last, and each length on its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import deadreckon as dr
from deadreckon.lab.environment import command
from deadreckon.lab.evaluation import exact_match, mean_of_best
from deadreckon.lab.markdown import table
from deadreckon.lab.recipe import Recipe
from deadreckon.lab.train import quiet_transformers
from deadreckon.lab.training import check_device, check_model, train
from deadreckon.tasks import TASKS, Task
from deadreckon.tasks.curriculum import PRISM_CURRICULA, Curriculum
from deadreckon.tasks.scan import LONGEST_TRAINED, Scan

WIDTHS = {"prism": 192}  # of the residual stream; the baseline's is 512
COPYING = ("reverse", "scan", "dynamic-copy")  # where one in five query cursors may jump
TWO_MODULES = ("odds-first", "stack")  # before layers 1 and 4
LENGTHS = {
    "scan": (10, 22, 24, 28, 32, 36, 40, 48), "multiplication": (3, 6, 9, 10, 11, 12, 15),
    "addition": (5, 10, 12, 15, 20, 25, 30, 40),
}  # fmt: skip
TIMES = (0.5, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 10)  # elsewhere: the longest that is trained on, so many times
LONGEST_SCORED = 150  # unless asked for


@dataclass(frozen=True)
class Settings:
    """One training: what the command line says, defaults filled in."""

    task: str
    encoding: str
    longest: int
    pace: float
    lengths: tuple[int, ...]
    count: int
    evaluations: int
    width: int
    layers: int
    heads: int
    positions: int  # of cursors in tests, and how far the baseline's sinusoids are shifted
    near: int  # positions of cursors in training
    cursors: dict[str, Any]  # other options of PRISM
    noise: tuple[float, float]  # to begin with, in the end
    recipe: Recipe

    def curriculum(self) -> Curriculum:
        """The paper's, at another pace and up to `longest`."""
        stages = [(max(1, round(steps * self.pace)), length) for steps, length in PRISM_CURRICULA[self.task].stages]
        return Curriculum(self.longest, tuple(stage for stage in stages if stage[1] < self.longest))

    def options(self, near: bool = False) -> dict[str, Any]:
        """Of the encoding, in training or in tests."""
        if self.encoding == "prism":
            modules = [0, 3] if self.task in TWO_MODULES and self.layers > 3 else [0]
            return {
                **self.cursors, "positions": self.near if near else self.positions, "noise": self.noise[1],
                "copy": 5 if self.task in COPYING else 0, "modules": modules,
            }  # fmt: skip
        if self.encoding == "sinusoidal":
            return {"shift": self.positions, "gain": (2 / self.width) ** 0.5}  # as loud as the embeddings
        return {}

    def model(self, near: bool = False) -> dr.DeadReckonForCausalLM:
        """As it begins, for training or for tests: the weights are the same."""
        torch.manual_seed(self.recipe.seed)
        config = dr.DeadReckonConfig(
            encoding=self.encoding, vocab_size=self.make_task().vocab_size, hidden_size=self.width,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, tie_word_embeddings=True,
            initializer_range=self.width**-0.5, encoding_options={self.encoding: self.options(near)},
        )  # fmt: skip
        return dr.DeadReckonForCausalLM(config)

    def noise_at(self, step: int) -> float:
        """How much there is after so many steps: it grows from 30% to 60% of them."""
        first, last = self.noise
        return first + (last - first) * min(max((step / self.recipe.steps - 0.3) / 0.3, 0.0), 1.0)

    def room_for(self, length: int) -> int:
        """The tokens of a row, rounded up."""
        rows, _ = self.make_task(length).sample(100, length, torch.Generator().manual_seed(0))
        return -(-rows.shape[1] // 64) * 64

    def score(self, model: dr.DeadReckonForCausalLM) -> Iterator[tuple[int, float]]:
        """Exact match at one length after the other."""
        for n in self.lengths:
            yield n, exact_match(model, self.make_task(n), n, count=self.count, batch_size=50)

    def make_task(self, length: int = 1) -> Task:
        """The task; SCAN's longer commands are in another split."""
        if self.task == "scan":
            return Scan("train" if length <= LONGEST_TRAINED else "test")
        return TASKS[self.task]()


def run(settings: Settings, device: str, folder: Path | None) -> dict[str, Any]:
    """Trains and scores one encoding, a printed line and a written file for each evaluation."""
    model, tested, recipe = settings.model(near=True).to(device), settings.model().to(device), settings.recipe
    name = f"{settings.encoding}-{recipe.seed}"
    results: dict[str, Any] = {
        "task": settings.task, "encoding": settings.encoding, "seed": recipe.seed, "trained_up_to": settings.longest,
        "command": command(),
        "device": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else device,
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "parameters": model.num_parameters(),
        "sizes": {"width": settings.width, "layers": settings.layers, "heads": settings.heads},
        "options": settings.options(), "positions_in_training": settings.near, "noise": settings.noise,
        "recipe": {**vars(recipe), "curriculum": vars(settings.curriculum())}, "count": settings.count,
        "evaluations": [], "best": {},
    }  # fmt: skip
    noise = torch.tensor(settings.noise_at(0), device=device)
    if settings.encoding == "prism" and settings.noise[0] != settings.noise[1]:  # else the model has it as an option
        for layer in model.model.layers:
            if layer.self_attn.encoding.cursors is not None:
                layer.self_attn.encoding.cursors.noise = noise
    every = max(1, recipe.steps // settings.evaluations)
    began, losses = time.perf_counter(), []
    for step in train(model, settings.make_task(), replace(recipe, curriculum=settings.curriculum())):
        noise.fill_(settings.noise_at(step.number))
        losses.append(step.losses)  # still on the device: to read it is to wait
        if step.number % every and step.number != recipe.steps:
            continue
        seconds = time.perf_counter() - began
        tested.load_state_dict(model.state_dict())
        exact = dict(settings.score(tested))
        loss = float(torch.stack(losses[-50:]).mean())
        losses.clear()
        results["evaluations"].append({"step": step.number, "seconds": seconds, "loss": loss, "exact": exact})
        results["best"] = best_by_length([one["exact"] for one in results["evaluations"]])
        scores = in_percent(exact, digits=0)
        print(f"{settings.task} {name}  step {step.number}  {seconds:.0f} s  loss {loss:.4f}  % {scores}", flush=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    if folder is not None:
        with quiet_transformers():
            tested.save_pretrained(folder / name)
    return results


def score_saved(given: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Exact match of a saved model at any lengths: its cursors get as many positions as these need."""
    check_model(given.score)
    config = dr.DeadReckonConfig.from_pretrained(given.score)
    settings = settings_of(given, config.encoding)
    if config.vocab_size != settings.make_task().vocab_size:
        raise ValueError(f"task: expected one of {config.vocab_size} tokens, as the model has, got {given.task!r}")
    if config.encoding == "prism":
        config.encoding_options["prism"]["positions"] = settings.positions
    return settings.score(dr.DeadReckonForCausalLM.from_pretrained(given.score, config=config).to(given.device))


def best_by_length(evaluations: Sequence[dict[int, float]]) -> dict[int, float]:
    """For each length the mean of the three best evaluations, or of all while there are fewer."""
    best = min(3, len(evaluations))
    return {n: mean_of_best([one[n] for one in evaluations], best) for n in evaluations[0]}


def in_percent(shares: dict[int, float], digits: int = 1) -> str:
    """By length, on one line."""
    return "  ".join(f"{n}: {100 * share:.{digits}f}" for n, share in shares.items())


def draw(folder: Path) -> Path:
    """A picture of all results in a folder, beside the page that has their table."""
    from deadreckon.lab.prism_pictures import lengths_picture

    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]
    results = [result for result in found if "evaluations" in result]
    if not results:
        raise ValueError(f"draw: expected a folder with results, got {folder}")
    (folder / "lengths.md").write_text(describe(results) + "\n![by length](lengths.png)\n")
    lengths_picture(results, folder / "lengths.png")
    return folder / "lengths.png"


def describe(results: Sequence[dict[str, Any]]) -> str:
    """A page: exact match by length of each run, what it took, and the command."""
    first = results[0]
    lengths = sorted({int(length) for result in results for length in result["best"]})
    rows = []
    for result in results:
        last, sizes = result["evaluations"][-1], result["sizes"]
        shares = [result["best"].get(str(n), result["best"].get(n)) for n in lengths]
        rows.append([
            result["encoding"], result["seed"], sizes["layers"], sizes["width"], f"{result['parameters'] / 1e6:.1f} M",
            f"{last['step']} of {result['recipe']['steps']}", f"{last['seconds']:.0f}",
            *("" if share is None else f"{100 * share:.1f}" for share in shares),
        ])  # fmt: skip
    heads = ["", "seed", "layers", "width", "parameters", "steps", "seconds", *lengths]
    return "\n".join([
        f"# {first['task']}: exact match by length", "",
        f"{first['date']}: {first['device']}, torch {first['torch']}. Trained up to length {first['trained_up_to']}. "
        f"In %, the mean of the three best evaluations at each length, of {first['count']} examples, as in the paper.",
        "",
        table(heads, rows), "", *(f"    {command}" for command in dict.fromkeys(r["command"] for r in results)), "",
    ])  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m deadreckon.lab.prism", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=PRISM_CURRICULA, default="copy")
    parser.add_argument("--encoding", nargs="+", default=["prism", "sinusoidal"], metavar="NAME")
    parser.add_argument("--longest", type=int, help="greatest length to train on; the paper's by default")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths to score")
    parser.add_argument("--count", type=int, default=200, help="examples of each length; the paper's is 1000 (200)")
    parser.add_argument("--evaluations", type=int, default=10, help="evenly spread over the training (10)")
    parser.add_argument("--pace", type=float, default=0.05, help="length of curriculum stages, paper = 1 (0.05)")
    parser.add_argument("--steps", type=int, default=5000, help="(5000)")
    parser.add_argument("--batch-size", type=int, default=100, help="(100)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="(3e-4)")
    parser.add_argument("--beta2", type=float, default=0.98, help="of AdamW (0.98)")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="(0.01)")
    parser.add_argument("--width", type=int, help="of the residual stream (192 with prism, else 512)")
    parser.add_argument("--layers", type=int, default=5, help="(5)")
    parser.add_argument("--heads", type=int, default=8, help="(8)")
    parser.add_argument("--pe-width", type=int, default=340, help="of superpositions (340)")
    parser.add_argument("--positions", type=int, help="of cursors, the baseline's shift (as long as rows, rounded up)")
    parser.add_argument("--similarity", type=float, default=20.0, help="what α begins with (20)")
    parser.add_argument("--gamma", type=float, default=2.0, help="what γ begins with (2)")
    parser.add_argument("--content", type=float, default=0.5, help="what μ begins with (0.5)")
    parser.add_argument("--start", action="store_true", help="learn the GRU's first hidden state, which else is 0")
    parser.add_argument("--norm", type=float, help="of the GRU's hidden-to-hidden matrix, in place of orthogonality")
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[0.0], metavar="STD",
        help="on the logits of gates in training; two: it grows from the one to the other (0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", type=Path, help="folder for results, models and a picture")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw saved results and stop")
    parser.add_argument(
        "--score", type=Path, metavar="MODEL", help="score a saved model at --lengths of --task, and stop"
    )
    parser.add_argument("--show", type=Path, metavar="MODEL", help="draw what a saved model's cursors do, and stop")
    parser.add_argument("--input", default="12345", help="question to show, without its = (12345)")
    parser.add_argument("--layer", type=int, help="to show; by default what position matters most to, as are these:")
    parser.add_argument("--head", type=int)
    parser.add_argument("--cursor", type=int)
    return parser.parse_args(arguments)


def settings_of(given: argparse.Namespace, encoding: str) -> Settings:
    """Defaults that depend on task and encoding filled in."""
    if not 1 <= len(given.noise) <= 2 or min(given.noise) < 0:
        raise ValueError(f"noise: expected one or two numbers of 0 or more, got {given.noise}")
    longest = given.longest or PRISM_CURRICULA[given.task].longest
    usual = LENGTHS.get(given.task) or tuple(n for n in (round(longest * t) for t in TIMES) if n <= LONGEST_SCORED)
    width = given.width or WIDTHS.get(encoding, 512)
    recipe = Recipe(
        task=given.task, encoding=encoding, layers=given.layers, width=width, heads=given.heads, tied=True,
        initial=width**-0.5, steps=given.steps, batch_size=given.batch_size, length=longest,
        learning_rate=given.learning_rate, betas=(0.9, given.beta2), weight_decay=given.weight_decay,
        warmup=min(100, given.steps), seed=given.seed, metric="exact",
    )  # fmt: skip
    cursors = {name: getattr(given, name) for name in ("similarity", "gamma", "content", "norm", "start")}
    settings = Settings(
        task=given.task, encoding=encoding, longest=longest, pace=given.pace, lengths=tuple(given.lengths or usual),
        count=given.count, evaluations=given.evaluations, width=width, layers=given.layers, heads=given.heads,
        positions=given.positions or 0, near=given.positions or 0, cursors={"width": given.pe_width, **cursors},
        noise=(given.noise[0], given.noise[-1]), recipe=recipe,
    )  # fmt: skip
    if settings.positions:
        return settings
    farthest = max(longest, *settings.lengths)
    return replace(settings, near=settings.room_for(longest), positions=settings.room_for(farthest))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    given = parse(arguments)
    if given.draw is not None:
        print(f"Picture: {draw(given.draw)}")
        return
    check_device(given.device)
    if given.show is not None:
        from deadreckon.lab.cursors import show

        check_model(given.show)
        model = dr.DeadReckonForCausalLM.from_pretrained(given.show).to(given.device)
        path = (given.save or given.show) / "cursors.png"
        print(f"{show(model, given.input, path, given.layer, given.head, given.cursor)}\nPicture: {path}")
        return
    if given.score is not None:
        for length, share in score_saved(given):
            print(
                f"{given.task} {given.score}: exact match at {length}, of {given.count}: {100 * share:.1f}%", flush=True
            )
        return
    for encoding in given.encoding:
        best = in_percent(run(settings_of(given, encoding), given.device, given.save)["best"])
        print(f"{given.task} {encoding}: exact match, mean of the best evaluations, %  {best}", flush=True)
    if given.save is not None:
        try:
            print(f"Picture: {draw(given.save)}")
        except ModuleNotFoundError as error:
            print(f"No picture without {error.name}: --draw {given.save} where it is installed")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
