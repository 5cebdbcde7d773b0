"""Folders of tokens made from documents: resuming, parts, and the script for the Linux kernel's sources."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from deadreckon.lab.recipes.texts import read_language
from deadreckon.tasks import tokens as tokens_module
from deadreckon.tasks.language import make_corpora, open_corpus
from deadreckon.tasks.tokens import END, fit_tokenizer, load_ids, write_ids

STORIES = [f"story {number} of the sea " * (3 + number) for number in range(9)]


def broken_after(documents: list[str], count: int) -> Iterator[str]:
    yield from documents[:count]
    raise KeyboardInterrupt


def test_writing_resumes_behind_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fit_tokenizer(STORIES, 280, "stories")
    write_ids(tmp_path / "whole.npy", STORIES, tokenizer, "stories")
    monkeypatch.setattr(tokens_module, "BATCH", 200)  # characters: about two stories
    path, encoded = tmp_path / "a.npy", []
    encode = tokens_module._encode
    monkeypatch.setattr(tokens_module, "_encode", lambda batch, *rest: encoded.extend(batch) or encode(batch, *rest))
    with pytest.raises(KeyboardInterrupt):
        write_ids(path, broken_after(STORIES, 6), tokenizer, "stories")
    assert not path.exists() and 0 < len(encoded) < 6
    with next(tmp_path.glob(".*.unfinished")).open("ab") as file:
        file.write(b"half a batch that was not noted")
    write_ids(path, STORIES, tokenizer, "stories")
    assert encoded == STORIES  # each of them once
    assert path.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.npy", "whole.npy"]


def test_an_unfinished_file_of_other_tokens_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "BATCH", 1)
    first, second = fit_tokenizer(STORIES, 270, "stories"), fit_tokenizer(STORIES, 280, "stories")
    with pytest.raises(KeyboardInterrupt):
        write_ids(tmp_path / "a.npy", broken_after(STORIES, 5), first, "stories")
    write_ids(tmp_path / "a.npy", STORIES, second, "stories")
    expected = [token for story in STORIES for token in (*second.encode(story).ids, second.token_to_id(END))]
    assert load_ids(tmp_path / "a.npy").tolist() == expected


def test_a_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deadreckon.tasks.language.BLOCK", 7)
    sources = {"train": lambda: iter(STORIES), "test": lambda: iter(STORIES[:2])}
    make_corpora(tmp_path, sources, 280, one_in=2)
    expected = fit_tokenizer(STORIES[::2], 280, "stories")
    corpus = open_corpus(tmp_path, "train")
    assert corpus.tokenizer.to_str() == expected.to_str()
    stories = [expected.decode(corpus.ids[start : stop - 1].tolist()) for start, stop in corpus.documents]
    assert stories == STORIES
    assert read_language(str(tmp_path), part="test").spell(open_corpus(tmp_path, "test").windows([0], 8)[0])
    kept = (tmp_path / "train.npy").read_bytes()
    make_corpora(tmp_path, dict.fromkeys(sources, lambda: pytest.fail("read again")), 280, one_in=2)
    assert (tmp_path / "train.npy").read_bytes() == kept
    with pytest.raises(ValueError, match=r"out: expected a new folder, or one of vocabulary 300, got .* of 280"):
        make_corpora(tmp_path, sources, 300, one_in=2)
    make_corpora(tmp_path, sources, 280, one_in=2, about={"part train": "a.txt"})
    make_corpora(tmp_path, sources, 280, one_in=2, about={"part test": "b.txt"})
    with pytest.raises(ValueError, match=r"or one of part train 'c\.txt', got .* of 'a\.txt'"):
        make_corpora(tmp_path, sources, 280, one_in=2, about={"part train": "c.txt"})
    with pytest.raises(ValueError, match="vocabulary: expected 257 or more, every byte"):
        fit_tokenizer(STORIES, 12, "stories")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "data" / "make_tokens.py"
    spec = importlib.util.spec_from_file_location("make_tokens", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tokens"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SOURCES = {
    "fs/a.c": "int a;\n", "fs/ext4/inode.c": "int i;\n", "fs/ext4/super/s.c": "int s;\n", "fs/ext4/xattr.h": "int x;\n",
    "fs/ext4plus/e.c": "int e;\n", "fs/z.c": "int z;\n", "kernel/bpf/core.c": "int c;\n", "kernel/fork.c": "int f;\n",
    "Makefile": "all:\n", "mm/empty.c": "", "drivers/gpu/drm/amd/include/reg.h": "#define R 1\n",
}  # fmt: skip


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "linux.tar.xz"
    with tarfile.open(path, "w:xz") as file:
        for name in sorted(SOURCES):
            member = tarfile.TarInfo(f"linux-6/{name}")
            member.size = len(SOURCES[name])
            file.addfile(member, io.BytesIO(SOURCES[name].encode()))
    return path


def test_directories_of_the_kernel(script: ModuleType, archive: Path) -> None:
    """A document has a directory's own files, wherever directories inside it stand between them."""
    found = dict(script.read_directories(archive))
    assert {path: text.count("//") for path, text in found.items()} == {
        "fs/ext4/super": 1, "fs/ext4": 2, "fs/ext4plus": 1, "fs": 2, "kernel/bpf": 1, "kernel": 1,
    }  # fmt: skip
    assert found["fs/ext4"] == "// fs/ext4/inode.c\nint i;\n\n// fs/ext4/xattr.h\nint x;\n\n"
    assert {path: script.part_of(path) for path in found} == {
        "fs/ext4/super": "valid", "fs/ext4": "valid", "fs/ext4plus": "train", "fs": "train", "kernel/bpf": "test",
        "kernel": "train",
    }  # fmt: skip


def test_the_script_makes_folders(
    script: ModuleType, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.Linux(archive, tmp_path / "code", vocabulary=270).run()
    counts = {part: len(open_corpus(tmp_path / "code", part).documents) for part in ("train", "valid", "test")}
    assert counts == {"train": 3, "valid": 2, "test": 1}
    assert "train: " in capsys.readouterr().out
    script.Linux(archive, tmp_path / "half", vocabulary=270, share=0.5).run()
    assert 1 <= len(open_corpus(tmp_path / "half", "train").documents) < 3
    (tmp_path / "a.txt").write_text("a text")
    script.Text(tmp_path / "text", (f"train={tmp_path / 'a.txt'}", f"valid={tmp_path / 'a.txt'}"), vocabulary=270).run()
    assert np.array_equal(open_corpus(tmp_path / "text", "train").ids, open_corpus(tmp_path / "text", "valid").ids)
    with pytest.raises(ValueError, match=r"parts: expected names and data, such as .*, got"):
        script.Text(tmp_path / "text", ("train",)).run()


def documents_in(folder: Path, part: str) -> list[str]:
    corpus = open_corpus(folder, part)
    return [corpus.tokenizer.decode(corpus.ids[start : stop - 1].tolist()) for start, stop in corpus.documents]


def test_the_script_mixes_folders(script: ModuleType, tmp_path: Path) -> None:
    """To the letter, whatever tokens these have; of one kind no more than is asked for."""
    tales = [f"a tale {END} — “№ {number}”\n\t" * 4 for number in range(12)]
    for name, texts, vocabulary in (("sea", STORIES, 280), ("land", tales, 265)):
        parts = {"train": texts[2:], "valid": texts[1:2], "test": texts[:1]}
        make_corpora(tmp_path / name, {part: partial(iter, some) for part, some in parts.items()}, vocabulary)
    count = sum(len(open_corpus(tmp_path / "sea", "train").tokenizer.encode(story).ids) + 1 for story in STORIES[2:])
    kinds = f"sea={tmp_path / 'sea'}:{count // 2}", f"land={tmp_path / 'land'}"
    for name in ("once", "again"):
        script.Mix(tmp_path / name, kinds, vocabulary=290).run()
    found = documents_in(tmp_path / "once", "train")
    sea = [text for text in found if text in STORIES]
    assert sorted(set(found) - set(sea)) == sorted(tales[2:]) and set(sea) < set(STORIES[2:]) and len(found) < 17
    lengths = [len(open_corpus(tmp_path / "sea", "train").tokenizer.encode(text).ids) + 1 for text in sea]
    assert count // 2 <= sum(lengths) <= count // 2 + max(lengths)
    assert found not in (sea + tales[2:], tales[2:] + sea)
    assert sorted(documents_in(tmp_path / "once", "valid")) == sorted([STORIES[1], tales[1]])
    assert documents_in(tmp_path / "once", "sea") == STORIES[:1]
    assert documents_in(tmp_path / "once", "land") == tales[:1]
    assert found == documents_in(tmp_path / "again", "train")
    for bad in ("sea", "train=tokens", f"sea={tmp_path / 'sea'}:all", f"sea={tmp_path / 'sea'}:0", f"land={tmp_path}"):
        with pytest.raises(ValueError, match=rf"kinds: expected names, each once, folders and tokens, .*, got {bad}"):
            script.Mix(tmp_path / "bad", (f"land={tmp_path / 'land'}", bad)).run()
    with pytest.raises(ValueError, match=r"kinds: expected one or more, such as .*, got none"):
        script.Mix(tmp_path / "bad", ()).run()
    assert not (tmp_path / "bad").exists()
