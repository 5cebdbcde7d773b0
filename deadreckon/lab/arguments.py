"""Parsing and validation of command-line values: names, numbers, sizes, output paths, and the command line itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import deadreckon as dr


def command() -> str:
    """Returns the command line of this process; modules of this package are spelled as `python -m` takes them."""
    program, package = Path(sys.argv[0]), Path(dr.__file__).parent
    words = [program.name]
    if program.is_relative_to(package):
        parts = program.relative_to(package.parent).with_suffix("").parts
        words = ["python", "-m", ".".join(part for part in parts if part != "__main__")]
    return shlex.join([*words, *sys.argv[1:]])


UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")  # endings of pictures


def names_in(texts: Iterable[str]) -> tuple[str, ...]:
    """Splits comma-separated names; names that are already separate stay as they are."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def numbers_in(texts: Iterable[str], name: str = "lengths", form: str = "whole numbers above 0") -> tuple[int, ...]:
    """Splits like `names_in`, and parses whole numbers above 0."""
    for text in names_in(texts):
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{name}: expected {form}, such as 512,4096, got {text!r}")
    return tuple(int(text) for text in names_in(texts))


def check_counts(**counts: int | None) -> None:
    """Raises ValueError if any count that is not None is below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}")


def check_output(name: str, path: Path | None, *endings: str) -> None:
    """Raises ValueError unless `path` is writable: a file with one of these endings, or a folder if none are given.

    Call it before the work, so that a long run does not fail when it saves its result.
    """
    if path is None:
        return
    if endings and (path.suffix.lower() not in endings or path.is_dir()):
        raise ValueError(f"{name}: expected a file that ends in {', '.join(endings)}, got {path}")
    places = path.absolute().parents if endings else (path.absolute(), *path.absolute().parents)
    there = next(one for one in places if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{name}: expected a place that can be written to, got {path}, where {there} cannot")


def bytes_in(text: str, name: str) -> int:
    """Parses a number of bytes, such as 5GB, 200 MB or 1000000."""
    number = text.strip().upper().removesuffix("B").strip()
    unit = UNITS.get(number[-1:], 1)
    digits = number[:-1].strip() if unit > 1 else number
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"{name}: expected a number of bytes, such as 5GB or 200MB, got {text!r}")
    return int(digits) * unit


def sizes_in(text: str, name: str, form: str) -> tuple[int, ...]:
    """Parses sizes such as 24x1024; the first word of `form`, such as LxW, says how many numbers there must be."""
    numbers, wanted = text.lower().split("x"), form.split(",")[0].split("x")
    if len(numbers) != len(wanted) or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"{name}: expected {form}, got {text!r}")
    return tuple(map(int, numbers))
