"""Text: reading and tokenising it, cached tokens, training rows, and perplexity by context length."""

from __future__ import annotations

import gzip
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import deadreckon as dr
from deadreckon.lab.evaluation.perplexity import Reader, loss_by_position, perplexity_by_length
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training import train
from deadreckon.tasks import tokens as tokens_module
from deadreckon.tasks.files import writing
from deadreckon.tasks.language import Corpus, Language, load_corpus, open_corpus, save_corpora
from deadreckon.tasks.task import NOT_SCORED, draw
from deadreckon.tasks.text import PACKED, fingerprint, read_documents
from deadreckon.tasks.tokens import (
    END,
    cut,
    for_transformers,
    load_ids,
    load_tokenizer,
    tokenize,
    train_tokenizer,
    write_ids,
)

TEXT = "the sea was calm and the wind had gone ; a sail stood far out , white as bone , and nobody spoke"
WORDS = TEXT.split()


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def story(number: int, words: int) -> str:
    picks = torch.randint(0, len(WORDS), (words,), generator=seed(number)).tolist()
    return " ".join(WORDS[pick] for pick in picks) + ".\n"


def write_jsonl(path: Path, texts: list[str]) -> Path:
    text = "".join(json.dumps({"title": "x", "text": text}) + "\n" for text in texts)
    opened = PACKED.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    data = write_jsonl(folder / "a.jsonl", [story(number, 40 + 60 * number) for number in range(8)])
    return load_corpus(data, vocabulary=300, cache=folder)


def make_model(encoding: str = "alibi", vocab_size: int = 300) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(3)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config)


@pytest.mark.parametrize("name", ["a.jsonl", *(f"a.jsonl{kind}" for kind in PACKED)])
def test_json_lines(tmp_path: Path, name: str) -> None:
    texts = ["Öl\r\nund\n", "", "two"]
    assert list(read_documents(write_jsonl(tmp_path / name, texts))) == ["Öl\r\nund\n", "two"]


def test_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "notes.md").write_text("not read")
    write_jsonl(tmp_path / "z.jsonl.txt.jsonl", ["third", "fourth"])
    with gzip.open(tmp_path / "z.txt.gz", "wt") as file:
        file.write("fifth")
    assert list(read_documents(tmp_path)) == ["first\n", "second\r\n", "third", "fourth", "fifth"]
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before != fingerprint(tmp_path, "title")
    (tmp_path / "a.txt").write_text("first!")
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', r"a JSON object, got .* in .*a\.jsonl, line 3"),
        ("a.jsonl", b"[1]\n", r"expected a JSON object, got list in .*a\.jsonl, line 1"),
        ("a.jsonl", b'{"title": "x"}\n', r"expected a field 'text', got 'title' in .*a\.jsonl, line 1"),
        ("a.jsonl", b'{"text": 3}\n', r"expected text in 'text', got int in .*a\.jsonl, line 1"),
        ("a.jsonl", b"", r"expected text, got none in .*a\.jsonl"),
        ("a.txt", b"", r"expected text, got none in .*a\.txt"),
        ("a.txt", b"\xff\xfe\xfa", r"can be read, got .*utf-8.* in .*a\.txt"),
        ("a.jsonl.xz", b"no xz at all", r"can be read, got .* in .*a\.jsonl\.xz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9], r"can be read, got .* in .*a\.jsonl\.gz"),
        ("a.jsonl.bz2", b"no bz2 at all", r"can be read, got .* in .*a\.jsonl\.bz2"),
        ("a.txt.zst", b"no zstd at all", r"can be read, got .* in .*a\.txt\.zst"),
        ("a.csv", b"x", r"expected a file that ends in one of \.jsonl, .*, got .*a\.csv"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="data: .*" + said):
        list(read_documents(tmp_path / name))


def test_zstd_needs_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_jsonl(tmp_path / "a.jsonl.zst", ["one"])
    monkeypatch.setattr("deadreckon.tasks.text.ZSTD", None)
    with pytest.raises(
        ValueError, match=r"data: expected `pip install backports\.zstd`.*, got no reader for .*a\.jsonl\.zst"
    ):
        list(read_documents(data))


def test_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"data: expected a file, a folder or hf:NAME, got .*nowhere"):
        list(read_documents(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"data: expected files that end in one of .*, got none in"):
        list(read_documents(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"data: hf:some/name needs .* pip install 'deadreckon\[datasets\]'"):
        list(read_documents("hf:some/name"))


def test_hugging_face_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their library is not here: what is asked of it, and what is made of its answers."""

    class Rows(list):
        info = SimpleNamespace(version="1.0.0", dataset_size=7)

    asked = []

    def load_dataset(name: str, configuration: str | None, *, split: str, streaming: bool) -> Rows:
        assert streaming
        asked.append((name, configuration, split))
        if name == "unknown":
            raise FileNotFoundError("no such dataset\nand more")
        return Rows([{"body": "one"}, {"body": ""}, {"body": "two"}])

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert list(read_documents("hf:an/owner", "body")) == ["one", "two"]
    assert list(read_documents("hf:an/owner:small:test", "body")) == ["one", "two"]
    assert asked == [("an/owner", None, "train"), ("an/owner", "small", "test")]
    before = fingerprint("hf:an/owner", "body")
    assert fingerprint("hf:an/owner", "body") == before != fingerprint("hf:an/owner", "text")
    monkeypatch.setattr(Rows.info, "dataset_size", 8)
    assert fingerprint("hf:an/owner", "body") != before
    with pytest.raises(ValueError, match="data: expected a field 'text', got body in hf:an/owner"):
        list(read_documents("hf:an/owner"))
    with pytest.raises(ValueError, match=r"data: .* got 'hf:unknown' \(no such dataset\)"):
        list(read_documents("hf:unknown"))


def test_tokens_are_the_text(tmp_path: Path) -> None:
    texts = ["naïve — 😀\r\n\n  two  blanks\t.", f"a text about {END} and\x00 zero", story(0, 50)]
    data = write_jsonl(tmp_path / "a.jsonl", texts)
    one = load_corpus(data, vocabulary=280, cache=tmp_path)
    assert one.vocab_size == 280 and one.ids.dtype == np.uint16
    # Every document ends once, even one that speaks of ends.
    assert int((one.ids == one.end).sum()) == len(texts) == len(one.documents)
    for (start, stop), text in zip(one.documents, texts, strict=True):
        assert Language(one).spell(torch.from_numpy(one.ids[start:stop].astype(np.int64))) == text + END


@pytest.mark.parametrize("size", [1, 7, 30])
def test_cut_texts_have_the_same_tokens(corpus: Corpus, size: int) -> None:
    text = story(5, 40) + "\n\n   \n  and\tso on  ;\n\n" + "x" * 50 + "  " + story(6, 9)
    pieces = list(cut(text, size))
    assert len(pieces) > 3 and "".join(pieces) == text
    together = [token for piece in pieces for token in corpus.tokenizer.encode(piece).ids]
    assert together == corpus.tokenizer.encode(text).ids


def test_cache_is_used_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    data = write_jsonl(tmp_path / "a.jsonl.xz", [story(1, 80), story(2, 80)])
    first = load_corpus(data, vocabulary=290)
    kept = sorted((tmp_path / "cache").iterdir())
    assert [path.suffix for path in kept] == [".json", ".npy"]
    content = [path.read_bytes() for path in kept]

    def never(*_: object) -> None:
        raise AssertionError("made again")

    with monkeypatch.context() as patched:
        patched.setattr(tokens_module, "read_documents", never)
        again = load_corpus(data, vocabulary=290)
        assert np.array_equal(again.ids, first.ids) and isinstance(again.ids, np.memmap)
        with pytest.raises(AssertionError, match="made again"):
            load_corpus(data, vocabulary=291)  # another vocabulary is another file
    for path, whole in zip(kept, content, strict=True):
        for damaged in (whole[: len(whole) // 2], b""):
            path.unlink()
            path.write_bytes(damaged)
            assert np.array_equal(load_corpus(data, vocabulary=290).ids, first.ids)
            assert path.read_bytes() == whole
    write_jsonl(data, [story(1, 80), story(3, 80)])
    assert not np.array_equal(load_corpus(data, vocabulary=290).ids, first.ids)


def test_a_state_that_outlives_its_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the file's new name and the end of its state; and the file is gone later."""
    tokenizer = train_tokenizer(write_jsonl(tmp_path / "a.jsonl", [story(1, 80)]), 290, cache=tmp_path)
    path, documents = tmp_path / "a.npy", [story(1, 80), story(2, 80)]
    unlink = Path.unlink

    def interrupt(file: Path, missing_ok: bool = False) -> None:
        if file.name == ".a.npy.state":
            raise KeyboardInterrupt
        unlink(file, missing_ok)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", interrupt)
        write_ids(path, documents, tokenizer, "a")
    whole = load_ids(path).copy()
    assert len(whole) > 100 and (tmp_path / ".a.npy.state").exists()
    path.unlink()
    write_ids(path, documents, tokenizer, "a")
    assert np.array_equal(load_ids(path), whole)


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    with pytest.raises(KeyboardInterrupt), writing(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert list(path.parent.iterdir()) == []
    with writing(path) as unfinished:
        unfinished.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "enough text to train on"}\n{"text"\n')
    tokenizer = train_tokenizer(write_jsonl(tmp_path / "b.jsonl", ["fine"]), 257, cache=tmp_path)
    with pytest.raises(ValueError, match="line 2"):
        tokenize(broken, tokenizer, cache=tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("*.npy"))


def test_vocabularies(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"vocabulary: expected 257 or more, .*, got 256"):
        train_tokenizer(tmp_path, 256)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer: expected a tokenizer\.json that can be read, got"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_tokenizer_beside_a_model(tmp_path: Path, corpus: Corpus) -> None:
    make_model().save_pretrained(tmp_path)
    for_transformers(corpus.tokenizer).save_pretrained(tmp_path)
    loaded, text = AutoTokenizer.from_pretrained(tmp_path), "the sea , and nobody"
    assert loaded(text).input_ids == corpus.tokenizer.encode(text).ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.eos_token_id == corpus.end
    model = dr.DeadReckonForCausalLM.from_pretrained(tmp_path)
    assert model.generate(**loaded(text, return_tensors="pt"), max_new_tokens=3, eos_token_id=None).shape[1] > 3


def test_rows_to_train_on(corpus: Corpus) -> None:
    task = Language(corpus)
    tokens, labels = task.sample(6, 20, seed(1))
    assert torch.equal(labels[:, 1:], tokens[:, 1:]) and (labels[:, 0] == NOT_SCORED).all()
    assert torch.equal(task.sample(6, 20, seed(1))[0], tokens)
    assert not torch.equal(task.sample(6, 20, seed(2))[0], tokens)
    stream = torch.from_numpy(corpus.ids.astype(np.int64))
    places = stream.unfold(0, 20, 1)
    assert all((places == row).all(1).any() for row in tokens)
    # The last window there is can be drawn, and nothing beyond it.
    short = Language(Corpus(corpus.ids[:5], corpus.tokenizer))
    assert {tuple(row) for row in short.sample(60, 4, seed())[0].tolist()} == {
        tuple(stream[:4].tolist()), tuple(stream[1:5].tolist())
    }  # fmt: skip
    with pytest.raises(ValueError, match="length: expected 2 to 5, got 6"):
        short.sample(1, 6, seed())
    with pytest.raises(ValueError, match="count: expected 1 or more, got 0"):
        short.sample(0, 4, seed())
    tokens, labels = task.sample(50, range(3, 9), seed())
    counts = (labels != NOT_SCORED).sum(1)
    assert set(counts.tolist()) == set(range(2, 8))
    assert (tokens[torch.arange(tokens.shape[1]) > counts[:, None]] == corpus.end).all()


def test_packed_documents_do_not_see_each_other(corpus: Corpus) -> None:
    rows, _ = Language(corpus).sample(6, 100, seed(4))
    (batch,) = draw(Language(corpus, packed=True), 6, 100, seed(4))
    assert batch.tokens.shape == (1, 600) and torch.equal(batch.tokens.view(6, 100), rows)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    expected = [0]
    for place, token in enumerate(batch.tokens[0].tolist(), 1):
        if token == corpus.end or place % 100 == 0:
            expected.append(place)
    assert batch.cu_seqlens.tolist() == expected and len(expected) > 7
    assert (batch.labels[0] == NOT_SCORED).nonzero().flatten().tolist() == expected[:-1]
    model = make_model("path")
    packed = model(batch.tokens, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
    losses = []
    for start, stop in pairwise(expected):
        part = batch.tokens[:, start:stop]
        alone = model(part).logits
        assert (alone - packed.logits[:, start:stop]).abs().max() < 1e-4
        losses.append(cross_entropy(alone[0, :-1], part[0, 1:], reduction="none"))
    assert packed.loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    assert draw(Language(corpus), 6, 100, seed(4))[0].cu_seqlens is None


def test_text_is_learned(corpus: Corpus) -> None:
    """Words are drawn alike: what can be known of the next is its spelling, log(words) nats a word."""
    steps = list(train(make_model("rope"), Language(corpus), Recipe(steps=60, batch_size=8, length=64)))
    assert steps[0].loss > 5 and steps[-1].loss < 3.2


def test_rows_to_score(corpus: Corpus) -> None:
    lengths = [int(stop - start) for start, stop in corpus.documents]
    rows = corpus.rows(50)
    assert rows.shape == (sum((length - 1) // 50 for length in lengths), 51)
    assert not (rows[:, :-1] == corpus.end).any()
    # Documents take turns, and the first row of one is its beginning.
    long = [int(start) for start, stop in corpus.documents if stop - start > 100]
    assert torch.equal(corpus.rows(100, 100 * len(long)), corpus.windows(long, 101))
    assert len(corpus.rows(50, 1)) == 1
    across = corpus.rows(50, across=True)
    assert torch.equal(across[1:, 0], across[:-1, -1]) and len(across) == (len(corpus.ids) - 1) // 50
    with pytest.raises(ValueError, match=f"length: expected less than {max(lengths)}, the longest document"):
        corpus.rows(max(lengths))
    assert corpus.rows(max(lengths) - 1).shape == (1, max(lengths))


def direct(model: dr.DeadReckonForCausalLM, tokens: Tensor) -> Tensor:
    """Losses of one sequence (T,), by the model's own forward pass."""
    with torch.no_grad():
        return cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")


@pytest.mark.parametrize("encoding", ["rope", "path-fox"])
def test_perplexity_by_length(corpus: Corpus, encoding: str) -> None:
    model = make_model(encoding).train()
    text = corpus.rows(96, 400)
    scores = perplexity_by_length(Reader(model, batch_tokens=100), corpus, (8, 32, 96), tokens=400)
    assert model.training
    for score in scores:
        rows = [
            direct(model, row[start : start + score.length + 1]) for row in text for start in range(0, 96, score.length)
        ]
        losses = torch.stack(rows)
        assert score.tokens == losses.numel() == 4 * 96
        assert score.loss == pytest.approx(losses.mean().item(), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-4)
        assert score.last_loss == pytest.approx(losses[:, -score.length // 4 :].mean().item(), rel=1e-5)
    uneven, even = perplexity_by_length(Reader(model), corpus, (36, 96), tokens=400)  # rows of 36, 36 and 24
    losses = torch.cat([direct(model, row[start : start + 37]) for row in text for start in range(0, 96, 36)])
    assert uneven.tokens == even.tokens == losses.numel() and uneven.loss == pytest.approx(losses.mean().item(), 1e-5)
    assert uneven.texts == pytest.approx(losses.view(4, 96).mean(1).tolist(), 1e-5)
    pieces = perplexity_by_length(Reader(model, piece=20), corpus, (8, 32, 96), tokens=400)
    assert [score.loss for score in pieces] == pytest.approx([score.loss for score in scores], rel=1e-5)
    with pytest.raises(ValueError, match="lengths: expected one or more, got none"):
        perplexity_by_length(Reader(model), corpus, ())


@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, 16), (10, None), (7, 3), (40, 1), (41, 5)])
def test_sliding_window(corpus: Corpus, window: int, stride: int | None) -> None:
    """Every token, from the row it is to be read in, worked out one by one."""
    model, rows = make_model("rope"), corpus.rows(41, 82)
    step = stride or window // 2
    expected = torch.empty(2, 41)
    for number, row in enumerate(rows):
        for told in range(1, 42):
            # The first row of the window that reaches as far as this token, or else the end of the text.
            stop = next((stop for stop in range(window, 41, step) if stop >= told), 41)
            expected[number, told - 1] = direct(model, row[stop - window : told + 1])[-1]
    found = Reader(model, batch_tokens=64).windowed_losses(rows, window, stride)
    assert (found - expected).abs().max() < 1e-4
    if window < 41:
        assert (found - Reader(model).losses(rows)).abs().max() > 1e-2
    score = perplexity_by_length(Reader(model), corpus, (5, 41), tokens=82, window=window, stride=stride)
    assert score[1].loss == pytest.approx(expected.double().mean().item(), rel=1e-5)
    assert score[0].loss == pytest.approx(perplexity_by_length(Reader(model), corpus, (5, 41), tokens=82)[0].loss)


def test_windows_are_checked(corpus: Corpus) -> None:
    model, rows = make_model(), corpus.rows(20, 20)
    with pytest.raises(ValueError, match=r"window: expected 1 to 20, .*, got 21"):
        Reader(model).windowed_losses(rows, 21)
    with pytest.raises(ValueError, match="stride: expected 1 to window = 8, got 9"):
        Reader(model).windowed_losses(rows, 8, 9)
    with pytest.raises(ValueError, match="piece: expected 1 or more, got 0"):
        Reader(model, piece=0).losses(rows)


def test_loss_by_position(corpus: Corpus) -> None:
    model, rows = make_model("path"), corpus.rows(100, 300)
    losses = torch.stack([direct(model, row) for row in rows]).double().mean(0)
    for logarithmic in (True, False):
        scores = loss_by_position(Reader(model), corpus, 100, 10, tokens=300, logarithmic=logarithmic)
        assert scores[0].first == 1 and scores[-1].last == 100
        for score, following in pairwise(scores):
            assert following.first == score.last + 1
        for score in scores:
            assert score.loss == pytest.approx(losses[score.first - 1 : score.last].mean().item(), rel=1e-5)
        widths = [score.last - score.first + 1 for score in scores]
        assert (widths[-1] > 30 and widths[0] <= 2) if logarithmic else widths == [10] * 10
    with pytest.raises(ValueError, match="bins: expected 1 to length = 4, got 5"):
        loss_by_position(Reader(model), corpus, 4, 5)


def test_random_positions_are_drawn_alike(corpus: Corpus) -> None:
    model, rows = make_model("random-rotation"), corpus.rows(30, 60)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    losses = Reader(model).losses(rows)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(Reader(model).losses(rows), losses)
    assert not torch.equal(Reader(model, seed=1).losses(rows), losses)


def test_folder_of_tokens(tmp_path: Path, corpus: Corpus) -> None:
    size = save_corpora(tmp_path, {"train": corpus, "valid": corpus}, {"train": 100})
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    train, valid = open_corpus(tmp_path, "train"), open_corpus(tmp_path, "valid")
    assert np.array_equal(train.ids, corpus.ids[:100]) and np.array_equal(valid.ids, corpus.ids)
    assert train.vocab_size == 300 and train.documents[-1, 1] == 100
    with pytest.raises(ValueError, match=r"tokens: expected a \.npy file of token ids, got .*test\.npy"):
        open_corpus(tmp_path, "test")
    other = Corpus(corpus.ids, train_tokenizer(write_jsonl(tmp_path / "a.jsonl", ["other"]), 260, cache=tmp_path))
    with pytest.raises(ValueError, match="corpora: expected one tokenizer for all of a, b, got several"):
        save_corpora(tmp_path, {"a": corpus, "b": other})
