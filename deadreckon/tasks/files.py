"""Atomic writes and file locks, for files that several processes may need at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Atomic write: yields a temporary path in the same folder, which is renamed to `path` unless an error occurs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file, created if missing, with an exclusive lock: other processes wait, where the system has flock."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            import fcntl
        except ModuleNotFoundError:
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
