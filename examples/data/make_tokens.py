"""Makes folders of tokens to train on: memory-mapped ids of a train, valid and test part, and their tokenizer.

    apt-get download linux-source-6.12 && dpkg-deb -x linux-source-6.12_*.deb .
    python examples/data/make_tokens.py linux usr/src/linux-source-6.12.tar.xz tokens/code
    python examples/data/make_tokens.py text tokens/books train=train.jsonl.xz valid=valid.jsonl.xz test=test.jsonl.xz
    python examples/data/make_tokens.py mix tokens/mixture code=tokens/code:56000000 books=tokens/books

A part of `text` is anything that `deadreckon.tasks.text.read_documents` reads: a file or a folder of .jsonl and .txt,
compressed or not, or hf:NAME, a Hugging Face dataset. Everything is streamed: memory does not grow with the data. If
killed, run the same command again: it resumes.

Then: deadreckon train code --change options.data=tokens/code …
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import tyro
from numpy.typing import NDArray
from tyro.conf import Positional

from deadreckon.tasks.language import Corpus, make_corpora, open_corpus
from deadreckon.tasks.text import read_documents

VOCABULARY = 16_384
LONG = 65_536  # tokens: documents that are longer are counted

# Held-out subsystems of the kernel, with everything below them. All others are trained on.
HELD_OUT = {
    "valid": ("block", "fs/ext4", "fs/nfs", "fs/ocfs2", "net/ipv6", "net/sctp"),
    "test": ("crypto", "drivers/md", "fs/btrfs", "kernel/bpf", "net/mac80211"),
}
GENERATED = ("drivers/gpu/drm/amd/include",)  # register tables, a third of all bytes
LARGEST = 400_000  # bytes of a file: larger ones are tables


@dataclass(frozen=True)
class Linux:
    """The kernel's C sources. A document is a directory: its own files in order, each behind a line with its path."""

    source: Positional[Path]  # linux-source-*.tar.xz
    out: Positional[Path]  # the folder to write
    vocabulary: int = VOCABULARY  # tokens of the tokenizer
    share: float = 1.0  # of the training documents, chosen by a hash of their paths

    def run(self) -> None:
        """Writes the folder."""
        sources = {part: partial(self._documents, part) for part in ("train", *HELD_OUT)}
        about = {"source": self.source.name, "share": self.share}
        make_corpora(self.out, sources, self.vocabulary, one_in=8, about=about)
        describe(self.out, list(sources))

    def _documents(self, wanted: str) -> Iterator[str]:
        for path, text in read_directories(self.source):
            part = part_of(path)
            if part == wanted and (part != "train" or crc32(path.encode()) < self.share * 2**32):
                yield text


@dataclass(frozen=True)
class Text:
    """Documents from files, folders or datasets."""

    out: Positional[Path]  # the folder to write
    parts: Positional[tuple[str, ...]]  # such as train=train.jsonl.xz valid=valid.jsonl.xz test=hf:NAME::test
    field: str = "text"  # of a line or a dataset, where the text is
    vocabulary: int = VOCABULARY  # tokens of the tokenizer, which is trained on the first part
    one_in: int = 1  # train the tokenizer on one document in so many

    def run(self) -> None:
        """Writes the folder."""
        named = [part.partition("=") for part in self.parts]
        if not named or not all(name and data for name, _, data in named):
            raise ValueError(f"parts: expected names and data, such as train=train.jsonl.xz, got {self.parts}")
        sources = {name: partial(read_documents, data, self.field) for name, _, data in named}
        about = {f"part {name}": [Path(data).name, size_of(data)] for name, _, data in named} | {"field": self.field}
        make_corpora(self.out, sources, self.vocabulary, one_in=self.one_in, about=about)
        describe(self.out, list(sources))


@dataclass(frozen=True)
class Mix:
    """Mixes documents of several folders of tokens, with one tokenizer for all: train and valid in random order, and
    each test part separately, under its kind's name."""

    out: Positional[Path]  # the folder to write
    # Such as code=tokens/code:56000000 books=tokens/books: about so many tokens (its own) of code, all of books.
    kinds: Positional[tuple[str, ...]]
    vocabulary: int = VOCABULARY  # tokens of the tokenizer, which is trained on what is mixed
    one_in: int = 1  # train the tokenizer on one document in so many
    seed: int = 0  # of which documents are taken, and of their order

    def run(self) -> None:
        """Writes the folder."""
        folders, tokens = dict[str, Path](), dict[str, int]()
        for kind in self.kinds:
            name, _, place = kind.partition("=")
            folder, _, count = place.partition(":")
            known = {"train", "valid", *folders}
            if not (name and folder) or name in known or (count and not (count.isdecimal() and int(count))):
                raise ValueError(
                    f"kinds: expected names, each once, folders and tokens, such as code=tokens/code:9000, got {kind}"
                )
            folders[name], tokens[name] = Path(folder), int(count or 0)
        if not folders:
            raise ValueError("kinds: expected one or more, such as code=tokens/code:9000, got none")
        sources = {
            "train": partial(self._mixed, "train", folders, tokens),
            "valid": partial(self._mixed, "valid", folders),
        }
        sources |= {name: partial(self._mixed, "test", {name: folder}) for name, folder in folders.items()}
        about = {f"kind {name}": [folder.name, tokens[name]] for name, folder in folders.items()} | {"seed": self.seed}
        make_corpora(self.out, sources, self.vocabulary, one_in=self.one_in, about=about)
        describe(self.out, list(sources))

    def _mixed(self, part: str, folders: dict[str, Path], tokens: dict[str, int] | None = None) -> Iterator[str]:
        generator, chosen = np.random.default_rng(self.seed), list[tuple[Corpus, NDArray[np.int64]]]()
        for name, folder in folders.items():
            corpus = open_corpus(folder, part)
            spans = generator.permutation(corpus.documents)
            lengths = spans[:, 1] - spans[:, 0]
            limit = (tokens or {}).get(name) or len(corpus.ids)
            chosen += [(corpus, span) for span in spans[np.cumsum(lengths) - lengths < limit]]
        for number in generator.permutation(len(chosen)):
            corpus, (start, stop) = chosen[number]
            ids = corpus.ids[start:stop]
            # Tokens are bytes, so that a whole document decodes to the very text that it was made of.
            yield corpus.tokenizer.decode(ids[ids != corpus.end].tolist())


def size_of(data: str) -> int | None:
    """Bytes of a file, so that one that has grown is told apart."""
    return Path(data).stat().st_size if Path(data).is_file() else None


def part_of(path: str) -> str:
    """The part (train, valid or test) of a directory of the kernel."""
    for part, subsystems in HELD_OUT.items():
        if any(path == one or path.startswith(one + "/") for one in subsystems):
            return part
    return "train"


def read_directories(archive: Path) -> Iterator[tuple[str, str]]:
    """Yields directories of an archive that have sources: path and text. A directory follows those inside it."""
    inside: list[tuple[str, list[str]]] = []  # the directories that the archive is in the midst of, and their files
    with tarfile.open(archive, "r|*") as members:
        while (member := members.next()) is not None:
            members.members = []  # else it remembers all of them
            path = member.name.partition("/")[2]
            if not member.isfile() or not is_source(path, member.size):
                continue
            directory = path.rpartition("/")[0]
            while inside and not f"{directory}/".startswith(f"{inside[-1][0]}/"):
                yield _close(inside)
            if not inside or inside[-1][0] != directory:
                inside.append((directory, []))
            file = members.extractfile(member)
            assert file is not None
            inside[-1][1].append(f"// {path}\n{file.read().decode('utf-8', 'replace')}\n")
    while inside:
        yield _close(inside)


def is_source(path: str, size: int) -> bool:
    """Whether a file is hand-written C."""
    return path.endswith((".c", ".h")) and 0 < size <= LARGEST and not path.startswith(GENERATED)


def _close(inside: list[tuple[str, list[str]]]) -> tuple[str, str]:
    path, files = inside.pop()
    return path, "".join(files)


def describe(folder: Path, parts: list[str]) -> None:
    """Prints the size of each part."""
    for part in parts:
        corpus = open_corpus(folder, part)
        lengths = np.diff(corpus.documents, axis=1)
        print(
            f"{folder / part}: {len(corpus.ids):,} tokens, {len(lengths):,} documents, {(lengths > LONG).sum():,} of "
            f"them longer than {LONG:,} tokens ({lengths[lengths > LONG].sum():,} tokens)"
        )


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"linux": Linux, "text": Text, "mix": Mix}).run()
