"""Reads documents: JSON lines and plain text, compressed or not, folders of such files, Hugging Face datasets."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any


def _find_zstd() -> Any:
    """The zstd module of Python 3.14 or later, or its backport, or None."""
    for name in ("compression.zstd", "backports.zstd"):
        if find_spec(name.split(".")[0]) and find_spec(name):
            return import_module(name)
    return None


ZSTD = _find_zstd()


def _open_zstd(path: Path, mode: str, **options: Any) -> IO[str]:
    if ZSTD is None:
        raise ValueError(f"data: expected `pip install backports.zstd` before Python 3.14, got no reader for {path}")
    file: IO[str] = ZSTD.open(path, mode, **options)
    return file


PACKED: dict[str, Callable[..., IO[str]]] = {
    ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open, ".zst": _open_zstd,
}  # fmt: skip
KINDS = tuple(kind + packed for kind in (".jsonl", ".txt") for packed in ("", *PACKED))
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, zlib.error, *([ZSTD.ZstdError] if ZSTD else []))
HUGGING_FACE = "hf:"


def read_documents(data: str | Path, field: str = "text") -> Iterator[str]:
    """The documents of a file, of a folder's files in order of their paths, or of a dataset; empty ones are skipped.

    Args:
        data: a file (.jsonl, one document per line; .txt, one document; either with .xz, .gz, .bz2 or .zst appended), a
            folder of such files, or hf:NAME[:CONFIGURATION[:SPLIT]], which is streamed, by default the train split.
        field: name of the text field in JSON lines and datasets.

    Raises:
        ValueError: for data that cannot be read, or has no text, with file and line.
    """
    if str(data).startswith(HUGGING_FACE):
        yield from _read_dataset(str(data), field)
        return
    for path in find_files(data):
        any_text = False
        for document in _read_file(path, field):
            any_text = True
            yield document
        if not any_text:
            raise ValueError(f"data: expected text, got none in {path}")


def find_files(data: str | Path) -> list[Path]:
    """The file, or all readable files in the folder, recursively."""
    path = Path(data)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(KINDS) and file.is_file())
        if not files:
            raise ValueError(f"data: expected files that end in one of {', '.join(KINDS)}, got none in {path}")
        return files
    if not path.is_file():
        raise ValueError(f"data: expected a file, a folder or {HUGGING_FACE}NAME, got {str(data)!r}")
    if not path.name.endswith(KINDS):
        raise ValueError(f"data: expected a file that ends in one of {', '.join(KINDS)}, got {path}")
    return [path]


def fingerprint(data: str | Path, field: str = "text") -> str:
    """A hash that changes with the documents: of the files' bytes, or of a dataset's name, version and size, since
    streamed data is not read for this."""
    digest = hashlib.sha256(field.encode())
    if str(data).startswith(HUGGING_FACE):
        info = _load_dataset(str(data)).info
        digest.update(f"{data}\0{info.version}\0{info.dataset_size}".encode())
        return digest.hexdigest()
    for path in find_files(data):
        digest.update(next(kind for kind in KINDS if path.name.endswith(kind)).encode())  # how the bytes are read
        content = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
        digest.update(content.digest())
    return digest.hexdigest()


def _read_file(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with _open(path) as file:
            if not path.name.removesuffix(path.suffix if path.suffix in PACKED else "").endswith(".jsonl"):
                if text := file.read():
                    yield text
                return
            for number, line in enumerate(file, 1):  # noqa: B007, named in what is raised
                if line.strip() and (text := _parse(line, field)):
                    yield text
    except UNREADABLE as error:
        place = f"{path}, after line {number}" if number else path
        raise ValueError(f"data: expected a file that can be read, got {error} in {place}") from error
    except _MalformedError as error:
        raise ValueError(f"data: expected {error} in {path}, line {number}") from error


class _MalformedError(Exception):
    """What was expected in a line, and what came; the caller adds the file and line number."""


def _parse(line: str, field: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise _MalformedError(f"a JSON object, got at column {error.colno}: {error.msg}") from error
    if not isinstance(document, dict):
        raise _MalformedError(f"a JSON object, got {type(document).__name__}")
    if field not in document:
        raise _MalformedError(f"a field {field!r}, got {', '.join(map(repr, document)) or 'none'}")
    if not isinstance(document[field], str):
        raise _MalformedError(f"text in {field!r}, got {type(document[field]).__name__}")
    try:
        document[field].encode()
    except UnicodeEncodeError as error:
        raise _MalformedError(f"text in {field!r}, got half of a character at {error.start}") from error
    return document[field]


def _open(path: Path) -> IO[str]:
    # Line endings are not translated: tokens are those of the file's bytes.
    return PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n")


def _read_dataset(data: str, field: str) -> Iterator[str]:
    any_text = False
    for row in _load_dataset(data):
        if field not in row:
            raise ValueError(f"data: expected a field {field!r}, got {', '.join(row)} in {data}")
        if row[field]:
            any_text = True
            yield row[field]
    if not any_text:
        raise ValueError(f"data: expected text, got none in {data}")


def _load_dataset(data: str) -> Any:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(f"data: {data} needs the datasets library: pip install 'deadreckon[datasets]'") from error
    name, _, rest = data.removeprefix(HUGGING_FACE).partition(":")
    configuration, _, split = rest.partition(":")
    try:
        return load_dataset(name, configuration or None, split=split or "train", streaming=True)
    except Exception as error:  # whatever that library raises: no network, no such name, no such split
        raise ValueError(
            f"data: expected a dataset that can be loaded, as {HUGGING_FACE}NAME[:CONFIGURATION[:SPLIT]], "
            f"got {data!r} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
