"""Language modelling on any text.

A corpus is one stream of tokens, with <|end|> after each document:

    Call me Ishmael. … orphan.<|end|>It was the best of times, …<|end|>
        └── a window of 8 ──┘

A row is a random window of the stream; every token but the first is a target. The length is the number of tokens.
*Streamed*, rows and attention cross document boundaries (as in the training of "Why Do Accumulated Transformations
Extrapolate?"). *Packed*, the rows of a batch are packed into one, in which no document sees another: see `task.draw`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from deadreckon.tasks import task
from deadreckon.tasks.files import writing
from deadreckon.tasks.tokens import (
    end_of,
    fit_tokenizer,
    load_ids,
    load_tokenizer,
    tokenize,
    train_tokenizer,
    write_ids,
)

TOKENIZER_FILE = "tokenizer.json"
ABOUT_FILE = "made-of.json"
BLOCK = 1 << 24  # tokens that are scanned at once


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as one stream of tokens.

    Attributes:
        ids: (tokens,), END after every document.
        tokenizer: the tokenizer that made them.
    """

    ids: NDArray[Any]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    @property
    def end(self) -> int:
        """The end-of-document token."""
        return end_of(self.tokenizer)

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Start and end of each document, (documents, 2)."""
        blocks = range(0, len(self.ids), BLOCK)
        ends = np.concatenate([n + np.flatnonzero(self.ids[n : n + BLOCK] == self.end) for n in blocks]) + 1
        if not len(ends) or ends[-1] < len(self.ids):
            ends = np.append(ends, len(self.ids))
        return np.stack([np.append(0, ends[:-1]), ends], axis=1)

    def windows(self, starts: Sequence[int], width: int) -> Tensor:
        """Tokens (len(starts), width)."""
        return torch.from_numpy(np.stack([self.ids[start : start + width] for start in starts]).astype(np.int64))

    def rows(self, length: int, tokens: int | None = None, *, across: bool = False) -> Tensor:
        """Rows for evaluation (count, length + 1): each gives `length` predictions, without overlap.

        Args:
            length: predictions per row.
            tokens: about how many predictions in all, at least one row; by default the whole corpus. The first rows of
                all documents come before their second ones.
            across: take rows from the stream, across document boundaries; else each is from one document, and documents
                shorter than a row are skipped.
        """
        if length < 1:
            raise ValueError(f"length: expected 1 or more, got {length}")
        spans = np.array([[0, len(self.ids)]]) if across else self.documents
        counts = (spans[:, 1] - spans[:, 0] - 1) // length
        starts = [
            int(span[0]) + turn * length
            for turn in range(int(counts.max(initial=0)))
            for span, count in zip(spans, counts, strict=True)
            if count > turn
        ]
        if not starts:
            longest, of = int((spans[:, 1] - spans[:, 0]).max()), "tokens" if across else "the longest document"
            raise ValueError(f"length: expected less than {longest}, {of} of the corpus, got {length}")
        return self.windows(starts[: max(1, tokens // length) if tokens is not None else None], length + 1)


def load_corpus(
    data: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: int = 8192,
    field: str = "text",
    cache: Path | None = None,
) -> Corpus:
    """Tokenizes text to a corpus, or loads it from the cache.

    Args:
        data: a file, a folder or a dataset, see :func:`deadreckon.tasks.text.read_documents`.
        tokenizer: that of the training text, for other texts; by default one is trained on this text.
        vocabulary: its vocabulary size, if it is trained.
        field: name of the text field in JSON lines and datasets.
        cache: the cache folder; see :func:`deadreckon.tasks.tokens.cache_folder`.
    """
    tokenizer = tokenizer or train_tokenizer(data, vocabulary, field=field, cache=cache)
    return Corpus(tokenize(data, tokenizer, field=field, cache=cache), tokenizer)


def save_corpora(folder: Path, corpora: dict[str, Corpus], tokens: dict[str, int] | None = None) -> int:
    """Writes corpora with a common tokenizer, by name, to a folder, from which they load without the text; only the
    first tokens of those for which `tokens` has a number.

    Returns:
        Total size of the files in bytes.
    """
    one, *others = corpora.values()
    if any(other.tokenizer.to_str() != one.tokenizer.to_str() for other in others):
        raise ValueError(f"corpora: expected one tokenizer for all of {', '.join(corpora)}, got several")
    with writing(folder / TOKENIZER_FILE) as unfinished:
        one.tokenizer.save(str(unfinished))
    for name, corpus in corpora.items():
        with writing(folder / f"{name}.npy") as unfinished, unfinished.open("wb") as file:
            np.save(file, corpus.ids[: (tokens or {}).get(name)])
    return sum((folder / name).stat().st_size for name in (TOKENIZER_FILE, *(f"{name}.npy" for name in corpora)))


def make_corpora(
    folder: Path,
    sources: dict[str, Callable[[], Iterable[str]]],
    vocabulary: int = 8192,
    *,
    one_in: int = 1,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder like :func:`save_corpora`, streaming from documents. If killed, the same call resumes.

    Args:
        sources: functions that return the documents of each part, by name; the tokenizer is trained on the first.
        vocabulary: vocabulary size of the tokenizer.
        one_in: train the tokenizer on one document in so many.
        about: everything else that determines the tokens, as JSON values, saved with them.

    Raises:
        ValueError: if the folder has tokens made with other settings.
    """
    kept, about = folder / ABOUT_FILE, {"vocabulary": vocabulary, "one_in": one_in, **(about or {})}
    before = json.loads(kept.read_text()) if kept.exists() else {}
    for name in before.keys() & about.keys():
        if before[name] != about[name]:
            raise ValueError(
                f"out: expected a new folder, or one of {name} {about[name]!r}, got {folder} of {before[name]!r}"
            )
    path = folder / TOKENIZER_FILE
    if kept.exists() or not path.exists():
        with writing(kept) as unfinished:
            unfinished.write_text(json.dumps(before | about, indent=1) + "\n")
    if not path.exists():
        name, documents = next(iter(sources.items()))
        tokenizer = fit_tokenizer(islice(documents(), 0, None, one_in), vocabulary, f"{folder} ({name})")
        with writing(path) as unfinished:
            tokenizer.save(str(unfinished))
    tokenizer = load_tokenizer(path)
    for name, documents in sources.items():
        if not (folder / f"{name}.npy").exists():
            write_ids(folder / f"{name}.npy", documents(), tokenizer, f"{folder} ({name})")


def open_corpus(folder: str | Path, name: str) -> Corpus:
    """Loads one of the corpora written by :func:`save_corpora` or :func:`make_corpora`."""
    return Corpus(load_ids(Path(folder) / f"{name}.npy"), load_tokenizer(Path(folder) / TOKENIZER_FILE))


@dataclass(frozen=True)
class Language:
    """The task.

    Args:
        corpus: that rows are drawn from.
        packed: whether attention is masked at document boundaries.
    """

    corpus: Corpus
    packed: bool = False

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def lengths(self) -> Sequence[int]:
        """From two tokens, one of them a target, to the whole corpus."""
        return range(2, len(self.corpus.ids) + 1)

    @property
    def document_end(self) -> int | None:
        """The token after which `task.draw` starts a new document, if packed."""
        return self.corpus.end if self.packed else None

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows with uniformly drawn starts."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        width = int(lengths.max())
        starts = torch.randint(0, len(self.corpus.ids) - width + 1, (count,), generator=generator)
        tokens = self.corpus.windows(starts.tolist(), width)
        place = torch.arange(width)
        there = place < lengths[:, None]
        labels = torch.where(there & (place > 0), tokens, task.NOT_SCORED)
        return torch.where(there, tokens, self.corpus.end), labels

    def spell(self, tokens: Tensor) -> str:
        """The text, including end-of-document tokens."""
        return str(self.corpus.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
