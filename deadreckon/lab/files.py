"""Atomic writes of files and folders, so that a kill at any moment leaves them whole; and JSON lines."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deadreckon.tasks.files import writing


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    with writing(path) as new:
        new.write_text(text)
        to_disk(new)
    to_disk(path.parent)


def format_line(values: Mapping[str, Any]) -> str:
    """Formats a line of JSON, with null for infinities and NaN, which JSON lacks."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
    return json.dumps(finite) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads JSON lines, except a last one that was cut off; an empty list if there is no such file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def add_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON lines; they are on disk when this returns."""
    with path.open("a") as file:
        file.writelines(map(format_line, lines))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write to, which then replaces `folder`."""
    yield begin(folder)
    complete(folder)


def begin(folder: Path) -> Path:
    """Creates an empty folder to write to, which `complete` will move to `folder`."""
    new, old = beside(folder)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    return new


def complete(folder: Path) -> None:
    """Replaces `folder` by the folder that `begin` created.

    Folders cannot be replaced atomically. So the old one is moved aside first: if it is aside and none is in its place,
    the new one is complete, and `recover` finishes the move. In any other case a new one is a leftover.
    """
    new, old = beside(folder)
    for path in (*new.rglob("*"), new):
        to_disk(path)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finishes a `complete` that was killed, or removes what was written before one."""
    new, old = beside(folder)
    if old.exists() and not folder.exists():
        new.rename(folder)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)


def interrupted(folder: Path) -> bool:
    """Whether a kill has left anything for `recover` to finish or remove."""
    return any(path.exists() for path in beside(folder))


def beside(folder: Path) -> tuple[Path, Path]:
    """Paths of the folder being written, and of the old one moved aside."""
    return folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")


def to_disk(path: Path) -> None:
    """Calls fsync on a file or folder."""
    if path.is_dir() and sys.platform == "win32":  # no fsync for folders there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
