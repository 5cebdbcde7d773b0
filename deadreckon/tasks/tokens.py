"""Tokenization: trains a byte-level BPE, and writes the ids of a corpus to a memory-mapped file. Both are cached.

Cache names contain a hash of the inputs. Files are renamed into place when complete; if writing ids is killed, the same
call resumes after the last batch of documents that was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from tqdm import tqdm

from deadreckon.tasks.files import locked, writing
from deadreckon.tasks.text import fingerprint, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|end|>"  # the token at the end of every document
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # its names in other tokenizers
BYTES = 256
VERSION = 1  # of the cache: increment it when the same data would give other files
PIECE = 1 << 20  # characters that a thread encodes at once
BATCH = 1 << 23  # characters encoded in parallel, then written: the most that a killed process loses


def cache_folder() -> Path:
    """$DEADRECKON_CACHE, or the folder deadreckon in the user's cache folder."""
    if chosen := os.environ.get("DEADRECKON_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deadreckon"


def train_tokenizer(
    data: str | Path, vocabulary: int = 8192, *, field: str = "text", cache: Path | None = None
) -> Tokenizer:
    """Trains a byte-level BPE of that many tokens (fewer if the text is too small), or loads it from the cache."""
    _check_vocabulary(vocabulary)
    key = _key(fingerprint(data, field), str(vocabulary))
    path = (cache or cache_folder()) / f"tokenizer-{vocabulary}-{key}.json"
    if path.exists():
        try:
            return load_tokenizer(path)
        except ValueError:
            pass  # damaged: train again
    tokenizer = fit_tokenizer(read_documents(data, field), vocabulary, str(data))
    with writing(path) as unfinished:
        tokenizer.save(str(unfinished))
    return tokenizer


def _check_vocabulary(vocabulary: int) -> None:
    if vocabulary <= BYTES:
        raise ValueError(f"vocabulary: expected {BYTES + 1} or more, every byte and {END}, got {vocabulary}")


def fit_tokenizer(documents: Iterable[str], vocabulary: int, name: str) -> Tokenizer:
    """Trains a byte-level BPE of that many tokens, including END."""
    _check_vocabulary(vocabulary)
    print(f"training a tokenizer on {name}", file=sys.stderr)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    tokenizer.train_from_iterator((piece for document in documents for piece in cut(document)), trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a tokenizer.json; its vocabulary must have one of the end tokens ENDS."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer: expected a tokenizer.json that can be read, got {path} ({error})") from error
    end_of(tokenizer)
    return tokenizer


def end_of(tokenizer: Tokenizer) -> int:
    """The id of the tokenizer's end-of-document token."""
    for name in ENDS:
        if (end := tokenizer.token_to_id(name)) is not None:
            return int(end)
    raise ValueError(f"tokenizer: expected one with {' or '.join(ENDS)} in its vocabulary, got one without")


def for_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for transformers; its `save_pretrained` saves it next to a model."""
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.id_to_token(end_of(tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def tokenize(data: str | Path, tokenizer: Tokenizer, *, field: str = "text", cache: Path | None = None) -> NDArray[Any]:
    """The ids of all documents, each followed by END, (tokens,), memory-mapped from the cache; written if missing."""
    key = _key(fingerprint(data, field), tokenizer.to_str())
    path = (cache or cache_folder()) / f"tokens-{key}.npy"
    if path.exists():
        try:
            return load_ids(path)
        except ValueError:
            path.unlink()  # damaged: write it again
    write_ids(path, read_documents(data, field), tokenizer, str(data))
    return load_ids(path)


def load_ids(path: str | Path) -> NDArray[Any]:
    """Ids (tokens,), memory-mapped from a .npy file."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"tokens: expected a .npy file of token ids, got {path} ({error})") from error
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32) or not len(ids):
        raise ValueError(f"tokens: expected unsigned integers (tokens,), got {ids.dtype} {ids.shape} in {path}")
    return ids


def write_ids(path: Path, documents: Iterable[str], tokenizer: Tokenizer, name: str) -> None:
    """Writes a .npy file of ids, with a progress bar, or resumes: documents already written are skipped.

    Until it is complete the file is called .NAME.unfinished, and .NAME.state says how much of it is valid. Processes
    that need the same file wait for the one that writes it.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # END in a document's text is ordinary text
    end = end_of(tokenizer)
    kind = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    unfinished, state = (path.with_name(f".{path.name}.{word}") for word in ("unfinished", "state"))
    key = _key(name, tokenizer.to_str())
    path.parent.mkdir(parents=True, exist_ok=True)
    often = 0.1 if sys.stderr.isatty() else 30.0  # seconds
    with locked(unfinished) as file, tqdm(desc=name, unit=" tokens", unit_scale=True, mininterval=often) as progress:
        if path.exists():  # another process has written it meanwhile
            return
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        _write_header(file, kind, 0)
        done = _read_state(state, key, (size - file.tell()) // kind.itemsize)
        file.seek(done["tokens"] * kind.itemsize, os.SEEK_CUR)
        file.truncate()
        progress.update(done["tokens"])
        for batch in _batches(islice(documents, done["documents"], None)):
            ids = _encode(batch, tokenizer, end, kind)
            file.write(ids.tobytes())
            file.flush()
            os.fsync(file.fileno())
            done = {"documents": done["documents"] + len(batch), "tokens": done["tokens"] + len(ids)}
            with writing(state) as new:
                new.write_text(json.dumps(done | {"key": key}))
            progress.update(len(ids))
        file.seek(0)
        _write_header(file, kind, done["tokens"])  # numpy leaves room for the count to grow
        file.flush()
        os.fsync(file.fileno())
        os.replace(unfinished, path)
        state.unlink(missing_ok=True)


def _read_state(path: Path, key: str, room: int) -> dict[str, int]:
    """How many documents and tokens of an unfinished file are valid: 0 if it was made from other inputs.

    Also 0 if the file is shorter than that: then the state is left over from a file that is complete, or deleted.
    """
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        state = {}
    valid = state.get("key") == key and state["tokens"] <= room
    return {name: state[name] if valid else 0 for name in ("documents", "tokens")}


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Batches of documents of about BATCH characters, at least one document each."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(documents: list[str], tokenizer: Tokenizer, end: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """The ids of documents, each followed by `end`, (tokens,)."""
    pieces = [list(cut(document)) for document in documents]
    encoded = iter(tokenizer.encode_batch_fast([piece for one in pieces for piece in one], add_special_tokens=False))
    parts = []
    for one in pieces:
        parts += [np.array(next(encoded).ids, kind) for _ in one]
        parts.append(np.array([end], kind))
    return np.concatenate(parts)


def _write_header(file: IO[bytes], kind: np.dtype[Any], count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def cut(text: str, size: int = PIECE) -> Iterator[str]:
    """Cuts a text before a blank, where no token of the BPE crosses: pieces' tokens concatenate to the text's."""
    start = 0
    while border := re.compile(r"(?<=\S)(?=\s)").search(text, start + size):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join([str(VERSION), *parts]).encode()).hexdigest()[:16]
