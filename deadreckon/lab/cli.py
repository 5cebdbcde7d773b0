"""The command line: `deadreckon demo | list | train | eval | compare | report | probe | convert | bench | generate`.

Each command is a dataclass: its fields are the arguments (comments are the help texts), `run` executes it and imports
heavy modules.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

try:
    import tyro
    from rich.console import Console
    from rich.text import Text
    from tyro.conf import Positional, arg
except ModuleNotFoundError as absent:
    sys.exit(f"The command line needs {absent.name}: pip install 'deadreckon[lab]'")

from deadreckon.lab.arguments import PICTURES, bytes_in, check_counts, check_output, command, names_in, numbers_in
from deadreckon.lab.bench.flags import Attention, Benchmark
from deadreckon.lab.memory import keep_freed_memory

Size = Literal["tiny", "small", "paper"]
Checkpoint = Literal["last", "best"]
OUT = arg(aliases=["-o", "--output"])  # one name for where a command writes, and two that people try


@dataclass(frozen=True)
class Demo:
    """Train small transformers side by side on flip-flop, and compare which position encodings can remember."""

    encodings: tuple[str, ...] = ("rope", "fox", "path")  # encodings to compare (see `deadreckon list`)
    steps: int = 500  # training steps, of 32 sequences each
    length: int = 128  # training sequence length
    seed: int = 0  # seed of weights and data
    picture: Path = Path("flipflop.png")  # save the picture to this file
    device: str = "cpu"  # cpu, cuda, …

    def run(self) -> None:
        console = Console()
        console.print("Loading PyTorch and transformers; about a minute on two free cores, measured in a moment …")
        from deadreckon.lab.environment import check_device
        from deadreckon.lab.pages.demo import demo_recipe, run_demo
        from deadreckon.lab.recipes import check_encodings

        names = names_in(self.encodings)
        check_encodings(names)
        check_device(self.device)
        check_output("picture", self.picture, *PICTURES)
        run_demo(console, names, demo_recipe(self.steps, self.length, self.seed), self.picture, self.device)


@dataclass(frozen=True)
class List:
    """List experiments, encodings and implementations, and what `impl="auto"` picks."""

    def run(self) -> None:
        from deadreckon.lab.pages.listing import print_listing

        print_listing()


@dataclass(frozen=True)
class Train:
    """Train one model from a recipe, in a run folder, and evaluate it by length.

    If killed, run the same command again: it resumes from the last checkpoint. On a CPU with the same number of threads
    the result is bit for bit that of an uninterrupted run.
    """

    resumes: ClassVar[bool] = True
    recipe: Positional[str]  # recipe to train, such as flipflop, mqrar-2 or reverse (see `deadreckon list`)
    out: Annotated[Path, OUT]  # run folder for checkpoints, metrics and scores; created if needed
    encoding: str = "path-fox"  # position encoding (see `deadreckon list`)
    size: Size = "tiny"  # tiny takes about a minute on a CPU, small minutes on a GPU, paper the paper's budget
    seed: int = 0  # seed of weights and data
    change: tuple[str, ...] = ()  # recipe fields to change, such as steps=1000 learning_rate=1e-3 options.ignore=0.9
    device: str = "cpu"  # cpu, cuda, …; on CUDA with bfloat16 autocast
    tensorboard: bool = False  # also write TensorBoard metrics to the run folder
    mesh: str = ""  # ranks started by torchrun, data parallel and context parallel, such as dp=2,cp=2
    timeout: float = 30.0  # minutes that a rank waits for another before it fails
    export: Path | None = None  # also export the final model to this folder, for from_pretrained
    shard_size: str = "5GB"  # maximum size of a weights file in --export

    def run(self) -> None:
        from deadreckon.lab.pages.card import write_cards
        from deadreckon.lab.recipes import find_recipe
        from deadreckon.lab.training import Ranks, export, summary, train_run

        largest = bytes_in(self.shard_size, "shard_size")
        check_output("out", self.out)
        check_output("export", self.export)
        if self.export is not None:
            path, own = self.export.resolve(), self.out.resolve()
            if path == own or path.is_relative_to(own / "last") or path.is_relative_to(own / "best"):
                raise ValueError(f"export: expected a folder that is not the run's own, got {self.export}")
        recipe = find_recipe(self.recipe, self.size, self.encoding, self.seed, self.change)
        ranks, device = Ranks.start(self.mesh, self.device, self.timeout)
        console = ranks.console(None)
        run = train_run(recipe, self.out, device=device, console=console, tensorboard=self.tensorboard, ranks=ranks)
        if ranks.first:
            write_cards(run)
            console.print(summary(run, run.scores()), highlight=False, soft_wrap=True)
            if self.export is not None:
                files = export(run.path / "last", self.export, largest)
                words = f"Exported: {self.export}, weights in {len(files)} file{'s' * (len(files) != 1)}"
                console.print(words, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model by length in every test of its recipe; or in the long-context suite, by generation.

    The suite takes any causal language model with a tokenizer. If killed, run the same command again: it resumes.
    """

    resumes: ClassVar[bool] = True
    folder: Annotated[Positional[Path], arg(name="run")]  # run folder; with --recipe or --suite, any saved model
    lengths: tuple[str, ...] = ()  # lengths to evaluate at, such as 512,4096,65536; by default those of the recipe
    checkpoint: Checkpoint = "last"  # the last checkpoint, or the best one in validation
    recipe: str = ""  # evaluate a saved model that is not a run in this recipe's tests, such as addition
    size: Size = "small"  # size of that recipe
    # Recipe fields of the tests to change, such as test_rows=1000. Scores with changed tests are printed, not saved.
    change: tuple[str, ...] = ()
    # Keep attention as sharp beyond this training length, in tokens. Scores are saved beside the run's own, the suite's
    # answers in `long-beyond-N`.
    sharpen_beyond: int | None = None
    suite: Literal["", "long"] = ""  # long: passkey, RULER's niah, vt, cwe and fwe, BABILong, PhoneBook
    tasks: tuple[str, ...] = ()  # tasks of the suite, such as passkey,vt; by default all that have data
    rows: int = 100  # questions of each task at each length
    babi: str = ""  # bAbI stories for BABILong: JSON lines with fields task and text
    books: str = ""  # books to hide the stories' facts in: a file, a folder or a dataset
    seed: int = 0  # seed of the suite's questions
    batch_tokens: int = 2**16  # prompt tokens in a batch
    # Folder for the suite's answers, tables and picture; by default `long` in the model's folder.
    out: Annotated[Path | None, OUT] = None
    beside: tuple[Path, ...] = ()  # other models that have been through the suite, to show in the same picture
    device: str = "cpu"  # cpu, cuda, …

    def run(self) -> None:
        self._check_flags("recipe", self.recipe, ("size",))
        of_suite = ("tasks", "rows", "babi", "books", "seed", "batch_tokens", "out", "beside")
        self._check_flags("suite", self.suite, of_suite)
        for name in ("recipe", "change") if self.suite else ():
            if getattr(self, name):
                raise ValueError(f"{name}: expected none beside --suite, got {getattr(self, name)!r}")
        if self.suite:
            self._run_suite()
        else:
            self._run_tests()

    def _check_flags(self, flag: str, given: str, others: tuple[str, ...]) -> None:
        """Raises ValueError for options that need --`flag` if that was not given."""
        defaults = {one.name: one.default for one in fields(self)}
        for name in others:
            if not given and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}: expected with --{flag} only, got {getattr(self, name)!r}")

    def _run_suite(self) -> None:
        from deadreckon.lab.pages.suite import run_suite

        check_output("out", self.out)
        run_suite(
            self.folder, numbers_in(self.lengths), tasks=names_in(self.tasks), rows=self.rows, babi=self.babi,
            books=self.books, checkpoint=self.checkpoint, seed=self.seed, batch_tokens=self.batch_tokens, out=self.out,
            sharpen_beyond=self.sharpen_beyond, beside=self.beside, device=self.device, console=Console(),
        )  # fmt: skip

    def _run_tests(self) -> None:
        from deadreckon.lab.recipes import find_recipe
        from deadreckon.lab.training import score_folder

        console = Console()
        said = score_folder(
            self.folder, numbers_in(self.lengths), recipe=find_recipe(self.recipe, self.size) if self.recipe else None,
            changes=self.change, kind=self.checkpoint, device=self.device, console=console,
            sharpen_beyond=self.sharpen_beyond,
        )  # fmt: skip
        console.print(said, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Compare:
    """Run an experiment: train each encoding on the same data and budget, and compare scores by length.

    Finished runs are used as they are, unfinished ones resume, missing ones are trained. Prints tables, draws a plot.
    """

    resumes: ClassVar[bool] = True
    experiment: Positional[str]  # experiment, such as flipflop, copy, rotations or powers (see `deadreckon list`)
    encodings: tuple[str, ...] = ()  # encodings, such as rope,fox,path; by default those of the experiment
    seeds: int = 1  # number of seeds, from 0 on; tables then show mean ± standard deviation
    size: Size = "tiny"  # tiny takes about a minute a model on a CPU, small minutes on a GPU, paper the paper's budget
    lengths: tuple[str, ...] = ()  # lengths to evaluate at, such as 512,4096; by default those of the recipe
    change: tuple[str, ...] = ()  # recipe fields to change, such as steps=1000 learning_rate=1e-3
    sweep: tuple[str, ...] = ()  # values to sweep, such as length=256,1024 p=2,4, in place of the experiment's sweep
    # Also evaluate the same models, without retraining, with attention kept as sharp beyond this many tokens.
    sharpen_beyond: int | None = None
    runs: Annotated[Path, arg(aliases=["-o", "--out"])] = Path("runs")  # folder of all runs
    picture: Path | None = None  # save the picture to this file; by default beside the runs
    page: Path | None = None  # also save the tables to this Markdown file, with the paper's figures
    device: str = "cpu"  # cpu, cuda, …
    jobs: int = 1  # runs to train at a time; small models leave most of a GPU idle
    finished: bool = False  # only report what is finished so far; train nothing

    def run(self) -> None:
        from deadreckon.lab.pages.compare import compare

        flags = asdict(self) | {"encodings": names_in(self.encodings), "lengths": numbers_in(self.lengths)}
        compare(flags.pop("experiment"), changes=flags.pop("change"), **flags)


@dataclass(frozen=True)
class Report:
    """Write a self-contained HTML report on runs: tables, pictures, recipes, environments.

    With --out PAGE.md, a Markdown report on conversions of one teacher.
    """

    runs: Positional[tuple[Path, ...]]  # folders of runs, or folders that contain runs; or folders of conversions
    out: Annotated[Path, OUT] = Path("report.html")  # file of the report: .html, or .md for conversions

    def run(self) -> None:
        from deadreckon.lab.pages.conversion import write_conversions
        from deadreckon.lab.pages.report import write_report

        if not self.runs:
            raise ValueError("runs: expected one or more folders, got none")
        check_output("out", self.out, ".html", ".htm", ".md")
        if self.out.suffix.lower() == ".md":
            write_conversions(self.out, self.runs, Console())
            return
        count = write_report(self.runs, self.out)
        print(f"{self.out}: {count} run{'s' * (count != 1)}, {self.out.stat().st_size:,} bytes")


@dataclass(frozen=True)
class Probe:
    """Analyse why a trained model does or does not extrapolate beyond its training length.

    For each layer and head: how fast the mean transport along routes decays with distance, the attention on far tokens
    with the theory's lower bound, how far values cancel; and the predicted context length, with the measured one.
    With --cursors, plot how PRISM's cursors move while the model answers a question; with --attention, attention maps.
    """

    folder: Annotated[Positional[Path], arg(name="run")]  # folder of a run, or of a model as save_pretrained writes it
    data: str = ""  # input: a task, or texts (.txt, .jsonl); by default what the run was trained on
    length: int = 0  # sequence length; by default four times the training length
    rows: int = 4  # number of sequences
    trained: int = 0  # training length in tokens; by default that of the run
    window: int = 0  # distance in tokens from which a token is far; by default each head's own
    queries: int = 32  # queries sampled in each sequence
    cursors: bool = False  # plot PRISM's cursors to cursors.png instead
    attention: bool = False  # plot attention maps to attention.png instead
    # Question to answer, without its =, or with = and a given answer; by default one of the task, of training length.
    question: str = ""
    layer: int | None = None  # layer to plot; by default all (--attention), or where position matters most (--cursors)
    head: int | None = None  # head to plot, likewise
    cursor: int | None = None  # cursor to plot, likewise
    checkpoint: Checkpoint = "last"  # the last checkpoint, or the best one in validation
    seed: int = 0  # seed of the sequences
    device: str = "cpu"  # cpu, cuda, …
    # Folder for probe.json and probe.png, cursors.png or attention.png; by default `probe` in the run's folder.
    out: Annotated[Path | None, OUT] = None

    def run(self) -> None:
        from deadreckon.lab.probe import run_probe
        from deadreckon.lab.probe.report import print_findings
        from deadreckon.lab.probe.source import Source

        asked = self.cursors or self.attention
        if self.cursor is not None and not self.cursors:
            raise ValueError(f"cursor: expected with --cursors only, got {self.cursor}")
        for name in ("question", "layer", "head"):
            if not asked and getattr(self, name) not in ("", None):
                raise ValueError(f"{name}: expected with --cursors or --attention only, got {getattr(self, name)!r}")
        console, out = Console(), self.out or self.folder / "probe"
        check_output("out", out)
        source = Source(self.folder, self.checkpoint, self.device, self.length or len(self.question))
        if asked:
            import torch

            from deadreckon.lab.probe import cursors, maps

            if self.cursors:
                cursors.layers_of(source.model)  # says so if there are no cursors to look at
            question, said = self.question or source.question(self.data, self.length, self.seed), ""
            torch.manual_seed(self.seed)  # for encodings that draw
            if self.attention:
                said = maps.show(source.model, question, out / "attention.png", (self.layer, self.head))
            if self.cursors:
                pair = cursors.Pair(self.layer, self.head, self.cursor)
                said = cursors.show(source.model, question, out / "cursors.png", pair)
            console.print(said, highlight=False)
        else:
            tokens, labels, usual = source.rows(self.data, self.rows, self.length, self.seed)
            rows, length = tokens.shape
            console.print(f"Reading {rows} × {length} tokens with {self.folder} …", highlight=False, soft_wrap=True)
            with console.status("probing every head"):
                findings = run_probe(
                    source.model, tokens, out, labels=labels, trained=self.trained or usual,
                    window=self.window or None, queries=self.queries, seed=self.seed,
                )  # fmt: skip
            print_findings(findings, console)
        console.print(f"Saved: {out}", highlight=False)


@dataclass(frozen=True)
class Convert:
    """Convert a RoPE checkpoint (Llama, Mistral, Qwen2, Qwen3) to another position encoding, and train it in stages.

    It starts with the same logits, unless --cold; distillation or training on longer contexts follow (--stages). If
    killed, run the same command again: it resumes.
    """

    resumes: ClassVar[bool] = True
    source: Annotated[Positional[str], arg(name="src")]  # folder of the model and its tokenizer
    data: str  # training text: a file, a folder, a folder of tokens or hf:NAME
    out: Annotated[Path, OUT]  # folder for the new model, its stages and the report
    held_out: str = ""  # held-out text; not needed with a folder of tokens
    encoding: str = "rope-path-fox"  # position encoding of the new model (see `deadreckon list`)
    drop_rope: bool = False  # fade RoPE's angles to zero in the first stage, to end with path-fox, path or fox
    cold: bool = False  # start with the encoding's usual initialisation, which changes the logits
    # Some of align, distil (both distillation) and extend (longer contexts), or none. By default align,distil with
    # --drop-rope or --cold, else extend: an exact start has nothing to learn from its teacher.
    stages: str = ""
    freeze: tuple[str, ...] = ()  # parts of parameter names to freeze, such as mlp
    length: int = 1024  # training sequence length
    change: tuple[str, ...] = ()  # recipe fields of the stages to change, such as batch_size=8 align.steps=500
    seed: int = 0  # seed of new weights and data
    beside: tuple[str, ...] = ()  # folders of other models to evaluate in the end, such as one trained from scratch
    device: str = "cpu"  # cpu, cuda, …; on CUDA with bfloat16 autocast

    def run(self) -> None:
        from deadreckon.lab.pages.conversion import convert
        from deadreckon.lab.recipes.conversion import Conversion

        stages = None
        if self.stages:
            stages = () if self.stages == "none" else tuple(stage.strip() for stage in self.stages.split(","))
        check_output("out", self.out)
        conversion = Conversion(
            self.source, self.encoding, self.data, self.held_out, self.drop_rope, self.cold, stages, self.freeze,
            self.length, self.seed, self.change, self.beside,
        )  # fmt: skip
        convert(conversion, self.out, self.device, Console())


@dataclass(frozen=True)
class Bench:
    """Run a benchmark: by default `attention`, which times other libraries, too, after checking our results."""

    benchmark: Annotated[Benchmark, arg(name="")] = field(default_factory=Attention)

    def run(self) -> None:
        from importlib import import_module

        self.benchmark.check()
        check_output("save", self.benchmark.save, ".md")
        import_module(f"deadreckon.lab.bench.{self.benchmark.name}").run(self.benchmark)


@dataclass(frozen=True)
class Generate:
    """Generate a continuation of a prompt, streamed, with tokens per second."""

    model: Positional[str]  # folder of a model and its tokenizer, as save_pretrained writes them, or of a run
    prompt: str  # text to continue
    tokens: int = 100  # maximum number of new tokens
    temperature: float = 0.8  # sampling temperature; 0 decodes greedily
    seed: int = 0  # seed of sampling
    device: str = "cpu"  # cpu, cuda, …

    def run(self) -> None:
        import torch
        from transformers import TextStreamer

        import deadreckon as dr
        from deadreckon.lab.environment import check_device, check_model
        from deadreckon.lab.recipes.texts import tokenizer_beside

        check_device(self.device)
        folder = Path(self.model)
        folder = folder / "last" if (folder / "recipe.json").exists() else folder
        check_model(folder)
        check_counts(tokens=self.tokens)
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 (greedy) or more, got {self.temperature}")
        model = dr.DeadReckonForCausalLM.from_pretrained(folder).to(self.device).eval()
        tokenizer = tokenizer_beside(str(folder))
        prompt = tokenizer(self.prompt, return_tensors="pt").input_ids.to(self.device)
        if (length := prompt.shape[1]) == 0:
            raise ValueError(f"prompt: expected at least one token, got {self.prompt!r}")
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        torch.manual_seed(self.seed)
        began = time.perf_counter()
        text = model.generate(
            prompt, max_new_tokens=self.tokens, streamer=TextStreamer(tokenizer), pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )  # fmt: skip
        seconds, new = time.perf_counter() - began, text.shape[1] - length
        speed = f"{new / seconds:.1f} tokens/s on {self.device}, seed {self.seed}"
        Console().print(f"{new} tokens after {length}, {speed}")


def main() -> None:
    """Entry point of the console command."""
    commands = (Demo, List, Train, Eval, Compare, Report, Probe, Convert, Bench, Generate)
    chosen: Any = None
    try:
        chosen = tyro.extras.subcommand_cli_from_dict(
            {one.__name__.lower(): one for one in commands}, prog="deadreckon",
            description="Attention with data-dependent position encodings.",
        )  # fmt: skip
        if getattr(getattr(chosen, "benchmark", chosen), "device", None) == "cpu":
            keep_freed_memory()
        chosen.run()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and stat.S_ISFIFO(os.fstat(1).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)  # the reader, such as `head`, has seen enough; rich ends its own output like this
        Console(stderr=True).print("[red]error[/]:", Text(str(error)), highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        resumes = getattr(chosen, "resumes", False)
        how = "To resume, run the same command again" if resumes else "Nothing is kept; to start again"
        Console(stderr=True).print(Text(f"Interrupted. {how}:\n  {command()}"), highlight=False, soft_wrap=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
