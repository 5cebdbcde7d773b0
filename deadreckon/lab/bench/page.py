"""Benchmark output: tables printed row by row, and the same as Markdown with hardware, versions and command."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

import torch
from rich.console import Console

from deadreckon.lab.arguments import check_counts
from deadreckon.lab.bench.flags import Flags
from deadreckon.lab.bench.timing import SUMMARIES, Work, shares
from deadreckon.lab.environment import check_device, processor, version_of
from deadreckon.lab.pages.tables import markdown, save_markdown

Row = list[str]
PARTS = ["", "time", "share", "calls"]
MOST = 24  # parts that are shown


class Page:
    """A page of results, saved after every row, so that an interrupted benchmark keeps what it has.

    Args:
        flags: of the benchmark.
        title: of the page.
        packages: whose versions are listed, besides torch's.
        summary: name of the statistic over several timings, if not the device's usual one.
    """

    def __init__(
        self, flags: Flags, title: str, packages: Iterable[str] = ("triton",), summary: str | None = None
    ) -> None:
        check_device(flags.device)
        rounds = getattr(flags, "rounds", None)
        check_counts(rounds=rounds)
        self.flags, self.console = flags, Console()
        threads = torch.get_num_threads()
        machine = torch.cuda.get_device_name() if flags.device == "cuda" else f"{processor()}, {threads} threads"
        versions = [f"{package} {version}" for package in packages if (version := version_of(package))]
        self.about = [machine, f"torch {torch.__version__}", *versions]
        self.about += [] if rounds is None else [f"{summary or SUMMARIES[flags.device][0]} of {rounds}"]
        self.title, self.parts = f"# {title} on {machine}", list[str]()

    def note(self, *notes: str) -> None:
        """Adds notes to the header and prints it, before the tables."""
        self.about += notes
        self._print("; ".join(self.about))

    def table(self, headings: Row, rows: Iterable[Row], title: str = "", left: int = 1) -> None:
        """Prints rows as they come; all columns but the first `left` are numeric."""
        kept = list[Row]()
        self.parts.append("")
        self._print(title)
        self._print(_aligned(headings, headings, left))
        for row in rows:
            kept.append(row)
            self._print(_aligned(row, headings, left))
            self.parts[-1] = f"{title}:\n\n" * bool(title) + markdown(headings, kept, left)
            self._write()

    def say(self, text: str) -> None:
        """Adds a paragraph."""
        self._print(text)
        self.parts.append(text)
        self._write()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self) -> None:
        if self.flags.save is None:
            return
        about = f"{date.today()}: {'; '.join(self.about)}. Inputs drawn with seed 0."
        save_markdown(self.flags.save, [self.title, about, f"    {self.flags.command()}", *self.parts])


def _aligned(row: Row, headings: Row, left: int) -> str:
    """A line for the terminal: names are 24 characters wide, numbers at least 10, ratios at least 6."""
    widths = [max(len(heading), 6 if heading.startswith("×") else 10) for heading in headings[left:]]
    numbers = [f"{cell:>{width}}" for cell, width in zip(row[left:], widths, strict=True)]
    return " ".join([*(f"{cell:24}" for cell in row[:left]), *numbers])


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs"


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def ratio(value: float, base: float) -> str:
    """value / base, or nothing if there is no base."""
    return f"{value / base:.2f}" if base else ""


def parts_of(work: Work, device: str) -> list[Row]:
    """Profiles `work`: rows for a table with the headings PARTS, the most expensive first."""
    taken = shares(work, device)
    whole = sum(time for time, _, _ in taken)
    rows = [[name[:70], milliseconds(time), ratio(time, whole), str(count)] for time, count, name in taken[:MOST]]
    return [*rows, ["all", milliseconds(whole), "", ""]]


def explain(error: Exception) -> str:
    """The error in one line, short enough for a table cell."""
    first, *_ = str(error).splitlines() or [""]
    return f"failed: {type(error).__name__}: {first}"[:120]
