"""The command line: `deadreckon demo | list | train | eval | compare | report | probe | bench | generate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    import tyro
    from rich.console import Console
    from rich.text import Text
except ModuleNotFoundError as absent:
    sys.exit(f"The command line needs {absent.name}: pip install 'deadreckon[lab]'")

from deadreckon.lab.bench.flags import Attention, Benchmark

Size = Literal["tiny", "small", "paper"]


def demo(
    encodings: tuple[str, ...] = ("rope", "fox", "path"),
    steps: int = 500,
    length: int = 128,
    seed: int = 0,
    picture: Path = Path("flipflop.png"),
    device: str = "cpu",
) -> None:
    """Train small transformers side by side on flip-flop, and see which of them remember.

    Args:
        encodings: names to compare (see `deadreckon list`).
        steps: training steps of 32 sequences.
        length: tokens of a training sequence.
        seed: of weights and data.
        picture: where to save the picture.
        device: cpu, cuda, …
    """
    from deadreckon.lab.compare import names_in
    from deadreckon.lab.demo import demo_recipe, run_demo
    from deadreckon.lab.recipes import check_encodings
    from deadreckon.lab.training import check_device

    names = names_in(encodings)
    check_encodings(names)
    check_device(device)
    run_demo(Console(), names, demo_recipe(steps, length, seed), picture, device)


def list_() -> None:
    """List recipes, encodings and implementations, and what `impl="auto"` picks."""
    from deadreckon.lab.listing import print_listing

    print_listing()


def train(
    recipe: str,
    /,
    out: Path,
    encoding: str = "path-fox",
    size: Size = "tiny",
    seed: int = 0,
    change: tuple[str, ...] = (),
    device: str = "cpu",
    tensorboard: bool = False,
) -> None:
    """Train one model by a recipe, in a folder that keeps all about it, and score it by length.

    The same command, given again, goes on from the last checkpoint: on a CPU with as many threads, the result is the
    same, bit for bit, as if it had never been stopped.

    Args:
        recipe: what to learn, such as flipflop, mqrar-2 or reverse (see `deadreckon list`).
        out: folder of the run; made if it is not there.
        encoding: name of the position encoding (see `deadreckon list`).
        size: tiny takes about a minute on a CPU, small minutes on a GPU, paper what the paper took.
        seed: of weights and data.
        change: fields of the recipe to change, such as steps=1000 learning_rate=1e-3 options.ignore=0.9.
        device: cpu, cuda, …; on CUDA it computes in bfloat16.
        tensorboard: also write metrics for TensorBoard, in the folder.
    """
    from deadreckon.lab.recipes import find_recipe
    from deadreckon.lab.train import summary, train_run

    console = Console()
    run = train_run(
        find_recipe(recipe, size, encoding, seed, change), out, device=device, console=console, tensorboard=tensorboard
    )
    console.print(summary(run, run.scores()), highlight=False, soft_wrap=True)


def eval_(
    run: Path,
    /,
    lengths: tuple[str, ...] = (),
    checkpoint: Literal["last", "best"] = "last",
    device: str = "cpu",
) -> None:
    """Score a trained model by length, in every test of its recipe.

    Args:
        run: folder of a run.
        lengths: where to score, such as 512,4096,65536; by default where its recipe says.
        checkpoint: the last weights, or those that did best while training.
        device: cpu, cuda, …
    """
    from deadreckon.lab.compare import numbers_in
    from deadreckon.lab.runs import Run
    from deadreckon.lab.train import quiet_transformers, score_run, summary
    from deadreckon.lab.training import check_device

    check_device(device)
    console, found = Console(), Run(run)
    with quiet_transformers():
        scores = score_run(found, numbers_in(lengths), kind=checkpoint, device=device, console=console)
    console.print(summary(found, scores), highlight=False, soft_wrap=True)


def compare(
    task: str,
    /,
    encodings: tuple[str, ...] = (),
    seeds: int = 1,
    size: Size = "tiny",
    lengths: tuple[str, ...] = (),
    change: tuple[str, ...] = (),
    runs: Path = Path("runs"),
    picture: Path | None = None,
    page: Path | None = None,
    device: str = "cpu",
    jobs: int = 1,
) -> None:
    """Compare encodings: the same model, data and budget for each, scores by length, as tables and a picture.

    Runs that are there already are used as they are, unfinished ones are finished, the rest is trained.

    Args:
        task: name of a recipe, such as flipflop, mqrar-2 or reverse (see `deadreckon list`).
        encodings: names, such as rope,fox,path,path-fox; by default those that the paper compares.
        seeds: how many models of each, from seed 0 on; tables then show mean ± standard deviation.
        size: tiny takes about a minute a model on a CPU, small minutes on a GPU, paper what the paper took.
        lengths: where to score, such as 512,4096; by default where the recipe says.
        change: fields of the recipe to change, such as steps=1000 learning_rate=1e-3.
        runs: folder of all runs.
        picture: where to save the picture; beside the runs by default.
        page: where to save the tables as Markdown too, with what the paper found.
        device: cpu, cuda, …
        jobs: how many to train at a time; small models leave most of a GPU to others.
    """
    from deadreckon.lab.compare import compare as run_compare
    from deadreckon.lab.compare import names_in, numbers_in

    run_compare(
        task, names_in(encodings), seeds=seeds, size=size, lengths=numbers_in(lengths), changes=change, runs=runs,
        device=device, jobs=jobs, picture=picture, page=page,
    )  # fmt: skip


def report(
    runs: tuple[Path, ...], /, output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
) -> None:
    """Write one page of HTML about runs: tables, pictures, recipes, environments, with nothing outside the file.

    Args:
        runs: folders of runs, or folders with such folders in them.
        output: the page.
    """
    from deadreckon.lab.report import write_report

    if not runs:
        raise ValueError("runs: expected one or more folders, got none")
    count = write_report(runs, output)
    print(f"{output}: {count} run{'s' * (count != 1)}, {output.stat().st_size:,} bytes")


def probe(
    run: Path,
    /,
    data: str = "",
    length: int = 0,
    rows: int = 4,
    trained: int = 0,
    window: int = 0,
    queries: int = 32,
    cursors: bool = False,
    question: str = "",
    layer: int | None = None,
    head: int | None = None,
    cursor: int | None = None,
    checkpoint: Literal["last", "best"] = "last",
    seed: int = 0,
    device: str = "cpu",
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
) -> None:
    """Look into a trained model for why it works beyond its training length, or does not.

    For each layer and head: how fast the mean of routes fades with their length, the attention that goes to far tokens
    beside the theory's lower bound, what their values add up to; and the range that follows, beside the one measured.
    With --cursors, how PRISM's cursors move while the model answers a question.

    Args:
        run: folder of a run, or of a model as save_pretrained writes it.
        data: what to read, a task or a text file; by default what the run was trained on.
        length: of the sequences to look at; by default four times the training length.
        rows: how many of them.
        trained: tokens of a training sequence; by default those of the run.
        window: tokens after which a token is far; by default each head's own.
        queries: looked at in each sequence.
        cursors: draw cursors.png instead.
        question: to answer, without its =; by default one of the task, as long as in training.
        layer: to draw; by default the one that position matters most to, and so on.
        head: to draw.
        cursor: to draw.
        checkpoint: the last weights, or those that did best while training.
        seed: of the sequences.
        device: cpu, cuda, …
        output: folder for probe.json and probe.png, or cursors.png; by default `probe` in that of the run.
    """
    from deadreckon.lab.probe import run_probe
    from deadreckon.lab.probe.report import print_findings
    from deadreckon.lab.probe.source import Source

    console, folder, source = Console(), output or run / "probe", Source(run, checkpoint, device)
    if cursors:
        from deadreckon.lab.probe.cursors_picture import show

        asked = question or source.question(data, length, seed)
        console.print(show(source.model, asked, folder / "cursors.png", layer, head, cursor), highlight=False)
    else:
        tokens, labels, usual = source.rows(data, rows, length, seed)
        found = run_probe(
            source.model, tokens, folder, labels=labels, trained=trained or usual, window=window or None,
            queries=queries, seed=seed,
        )  # fmt: skip
        print_findings(found, console)
    console.print(f"Saved: {folder}", highlight=False)


def bench(benchmark: Annotated[Benchmark, tyro.conf.arg(name="")] = Attention()) -> None:  # noqa: B008
    """Time ours beside what else there is, after checking it: attention unless another is named."""
    from importlib import import_module

    import_module(f"deadreckon.lab.bench.{benchmark.name}").run(benchmark)


def generate(
    model: str,
    /,
    prompt: str,
    tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Continue a text with a model, printed as it comes, with tokens per second.

    Args:
        model: folder with a model and its tokenizer, as save_pretrained writes them.
        prompt: the text to continue.
        tokens: how many tokens to add, at most.
        temperature: of sampling; 0 takes the likeliest token each time.
        seed: of sampling.
        device: cpu, cuda, …
    """
    from deadreckon.lab.generation import run_generate

    run_generate(model, prompt, tokens, temperature, seed, device, Console())


def main() -> None:
    """The console command."""
    commands: dict[str, Callable[..., Any]] = {
        "demo": demo, "list": list_, "train": train, "eval": eval_, "compare": compare, "report": report,
        "probe": probe, "bench": bench, "generate": generate,
    }  # fmt: skip
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="deadreckon", description="Attention whose positions are reckoned from content."
        )
    except (ValueError, OSError) as error:
        Console(stderr=True).print("[red]error[/]:", Text(str(error)), highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
