"""The command line: `deadreckon demo | list | bench | generate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal


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
    from rich.console import Console

    from deadreckon.lab.demo import run_demo
    from deadreckon.lab.training import Recipe, check_device

    if not encodings:
        raise ValueError("encodings: expected at least one name, got none")
    check_device(device)
    run_demo(Console(), encodings, Recipe(steps=steps, length=length, seed=seed), picture, device)


def list_() -> None:
    """List encodings and implementations, and what `impl="auto"` picks."""
    from deadreckon.lab.listing import print_listing

    print_listing()


def bench(
    device: Literal["cpu", "cuda"] = "cpu",
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    batch: int = 1,
    heads: int = 4,
    head_dim: int = 64,
    shapes: tuple[str, ...] = (),
    rounds: int = 5,
    only: str = "",
    save: Path | None = None,
) -> None:
    """Time every mechanism beside other people's attention in one run, with peak memory, as ratios.

    The baseline is PyTorch's causal attention on a CPU, and RoPE with FlashAttention-2 on a GPU, where
    flash-linear-attention and the FoX authors' kernel run too, if installed. Each mechanism is checked against the
    float64 definition before anything is timed; the errors of the others are shown.

    Args:
        device: where to run; float32 on a CPU, bfloat16 on a GPU.
        lengths: sequence lengths T.
        batch: B.
        heads: H.
        head_dim: D.
        shapes: in place of these four, any of BxTxHxD, such as 32x4096x32x64.
        rounds: timings of each case; the best counts on a CPU, which others may share, and the median on a GPU.
        only: names to run beside the baseline, separated by commas: "PaTH,fla PaTH".
        save: also write the tables as Markdown.
    """
    from deadreckon.lab.bench import run_bench
    from deadreckon.lab.cases import Shape

    chosen = [Shape.parse(shape) for shape in shapes] or [Shape(batch, n, heads, head_dim) for n in lengths]
    run_bench(device, tuple(chosen), rounds, only, save)


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
    from rich.console import Console

    from deadreckon.lab.generation import run_generate

    run_generate(model, prompt, tokens, temperature, seed, device, Console())


def main() -> None:
    """The console command."""
    try:
        import tyro
        from rich.console import Console
    except ModuleNotFoundError as error:
        sys.exit(f"The command line needs {error.name}: pip install 'deadreckon[lab]'")
    commands: dict[str, Callable[..., Any]] = {"demo": demo, "list": list_, "bench": bench, "generate": generate}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="deadreckon", description="Attention whose positions are reckoned from content."
        )
    except ValueError as error:
        Console(stderr=True).print(f"[red]error[/]: {error}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
