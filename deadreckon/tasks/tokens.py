"""Text as tokens: a byte-level BPE trained once, and the ids of a corpus in a file that is mapped, not read.

Both are cached under names that change with what they were made of. A file appears under its name when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from deadreckon.tasks.text import fingerprint, read_documents

END = "<|end|>"  # stands behind every document
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # what it is called in tokenizers of others
BYTES = 256
VERSION = 1  # of what is cached: raise it where the same data would give other files
PIECE = 1 << 20  # characters that are encoded at once


def cache_folder() -> Path:
    """$DEADRECKON_CACHE, or deadreckon in the user's cache folder."""
    if chosen := os.environ.get("DEADRECKON_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deadreckon"


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


def train_tokenizer(
    data: str | Path, vocabulary: int = 8192, *, field: str = "text", cache: Path | None = None
) -> Tokenizer:
    """A byte-level BPE of that many tokens (fewer if the text gives no more), from the cache if it is there."""
    if vocabulary <= BYTES:
        raise ValueError(f"vocabulary: expected {BYTES + 1} or more, every byte and {END}, got {vocabulary}")
    key = _key(fingerprint(data, field), str(vocabulary))
    path = (cache or cache_folder()) / f"tokenizer-{vocabulary}-{key}.json"
    if path.exists():
        try:
            return load_tokenizer(path)
        except ValueError:
            pass  # damaged: made again
    print(f"training a tokenizer on {data}", file=sys.stderr)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )  # fmt: skip
    pieces = (piece for document in read_documents(data, field) for piece in cut(document))
    tokenizer.train_from_iterator(pieces, trainer)
    with writing(path) as unfinished:
        tokenizer.save(str(unfinished))
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json with our end of documents in it."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer: expected a tokenizer.json that can be read, got {path} ({error})") from error
    end_of(tokenizer)
    return tokenizer


def end_of(tokenizer: Tokenizer) -> int:
    """The token behind every document."""
    for name in ENDS:
        if (end := tokenizer.token_to_id(name)) is not None:
            return int(end)
    raise ValueError(f"tokenizer: expected one with {' or '.join(ENDS)} in its vocabulary, got one without")


def for_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same for Hugging Face's tools; `save_pretrained` puts it beside a model."""
    end = tokenizer.id_to_token(end_of(tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def tokenize(data: str | Path, tokenizer: Tokenizer, *, field: str = "text", cache: Path | None = None) -> NDArray[Any]:
    """The ids of all documents, each with END behind it, (tokens,), mapped from the cache; made if not there."""
    key = _key(fingerprint(data, field), tokenizer.to_str())
    path = (cache or cache_folder()) / f"tokens-{key}.npy"
    if path.exists():
        try:
            return load_ids(path)
        except ValueError:
            pass  # damaged: made again
    with writing(path) as unfinished:
        write_ids(unfinished, read_documents(data, field), tokenizer, str(data))
    return load_ids(path)


def load_ids(path: str | Path) -> NDArray[Any]:
    """Ids (tokens,), mapped from a .npy file."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"tokens: expected a .npy file of token ids, got {path} ({error})") from error
    if ids.ndim != 1 or ids.dtype not in (np.uint16, np.uint32) or not len(ids):
        raise ValueError(f"tokens: expected unsigned integers (tokens,), got {ids.dtype} {ids.shape} in {path}")
    return ids


def write_ids(path: Path, documents: Iterator[str], tokenizer: Tokenizer, name: str) -> None:
    """Writes a .npy file as the ids come, and shows how far it is."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True  # END in a text is text, not the end
    end = end_of(tokenizer)
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    count = 0
    often = 0.1 if sys.stderr.isatty() else 30.0  # seconds
    with path.open("wb") as file, tqdm(desc=name, unit=" tokens", unit_scale=True, mininterval=often) as progress:
        _write_header(file, kind, count)
        for document in documents:
            pieces = tokenizer.encode_batch_fast(list(cut(document)), add_special_tokens=False)
            ids = np.array([token for piece in pieces for token in piece.ids] + [end], kind)
            file.write(ids.tobytes())
            count += len(ids)
            progress.update(len(ids))
        file.seek(0)
        _write_header(file, kind, count)  # numpy leaves room for the count to grow


def _write_header(file: Any, kind: type, count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(kind)), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def cut(text: str, size: int = PIECE) -> Iterator[str]:
    """Pieces of a text whose tokens, one after another, are the text's: no token crosses from a letter to a blank."""
    start = 0
    while border := re.compile(r"(?<=\S)(?=\s)").search(text, start + size):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join([str(VERSION), *parts]).encode()).hexdigest()[:16]
