"""Files that several processes may want at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Another path in the same folder, to write to; what is there takes the name `path` if nothing went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, made if it is not there, open for this process alone; others wait, where the system has such locks."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            import fcntl
        except ModuleNotFoundError:
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
