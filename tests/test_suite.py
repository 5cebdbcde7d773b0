"""`deadreckon eval --suite long` and the evaluator `long`: generation, resuming, tables and pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from readers import read
from small_runs import quiet, run_cli
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deadreckon as dr
from deadreckon.lab.environment import fingerprint
from deadreckon.lab.evaluation import format_value, is_better, long
from deadreckon.lab.evaluation.long import Answer, Answers, ask, generate
from deadreckon.lab.pages import suite as pages
from deadreckon.lab.pages.suite import depths, mean_scores, run_suite
from deadreckon.lab.recipes import find_recipe
from deadreckon.lab.training import Run, train_run
from deadreckon.tasks.long import LONG_TASKS
from deadreckon.tasks.long.phonebook import PhoneBook
from deadreckon.tasks.long.question import draw
from deadreckon.tasks.tokens import for_transformers, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [draw(make(), number, 2048, 60).prompt for make in LONG_TASKS.values() for number in range(2)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return for_transformers(train_tokenizer(folder / "a.jsonl", 1500, cache=folder))


def make_model(kind: str, vocabulary: int) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, intermediate_size=64, **sizes)).eval()
    return dr.DeadReckonForCausalLM(dr.DeadReckonConfig(vocab_size=vocabulary, encoding=kind, **sizes)).eval()


def continued(model: Any, ids: list[int], count: int, stop: int | None) -> list[int]:
    """Greedy decoding by its definition: without a cache, padding or batches."""
    said: list[int] = []
    with torch.no_grad():
        while len(said) < count:
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
            if said[-1] == stop:
                return said[:-1]
    return said


@pytest.mark.parametrize("kind", ["path-fox", "llama"])
def test_batches_say_what_each_would(
    kind: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left padding, the KV cache and prompts in pieces change nothing; other models read no more than a piece."""
    monkeypatch.setattr(long, "PIECE", 16)
    model, widths = make_model(kind, len(tokenizer)), []
    prompts = ["the pass key is 1", "One of the special magic numbers for x is: 12. " * 3, "Nora Becker: 735 " * 2]
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    assert min(map(len, ids)) < 16 < max(map(len, ids))
    expected = [continued(model, row, 6, None) for row in ids]
    ends = expected[1][3]  # where one of the answers stops
    model.generation_config.eos_token_id = ends
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append((args[0] if args else kwargs["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    said = generate(model, tokenizer, prompts, 6)
    hook.remove()
    assert said == [tokenizer.decode(continued(model, row, 6, ends)) for row in ids]
    assert len(set(said)) == 3 and (kind != "llama" or max(widths) == 16)
    assert [generate(model, tokenizer, [prompt], 6)[0] for prompt in prompts] == said


def test_the_tokenizer_says_where_answers_end(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("rope", len(tokenizer))
    with torch.no_grad():
        model.lm_head = torch.nn.Linear(32, len(tokenizer))
        model.lm_head.bias.fill_(0)[tokenizer.eos_token_id] = 1e4
    assert model.generation_config.eos_token_id is None
    calls: list[None] = []
    model.model.register_forward_hook(lambda *words: calls.append(None))
    assert generate(model, tokenizer, ["Nora Becker:", "Ivan:"], 5) == ["", ""]
    assert len(calls) == 1  # nothing is generated behind the end


def test_answers_stay_within_the_length(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def say(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int, seed: int) -> list[str]:
        seen.append(len(prompts))
        assert all(len(tokenizer(prompt).input_ids) + new_tokens <= 1000 for prompt in prompts)
        return [" 1"] * len(prompts)

    monkeypatch.setattr(long, "generate", say)
    tasks = {"phonebook": PhoneBook()}
    batches = list(ask(None, tokenizer, tasks, [1000], 7, batch_tokens=3000))  # type: ignore[arg-type]
    assert seen == [3, 3, 1] and [answer.number for batch in batches for answer in batch] == list(range(7))
    assert all(answer.tokens + PhoneBook().new_tokens > 975 for batch in batches for answer in batch)
    known = {("phonebook", 1000, number) for number in (0, 1, 2, 3, 6)}
    [rest] = ask(None, tokenizer, tasks, [1000], 7, known=known, batch_tokens=3000)  # type: ignore[arg-type]
    assert rest == [batches[1][1], batches[1][2]]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Llama with its tokenizer."""
    make_model("llama", len(tokenizer)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces generation: answers are read from the prompts, as long as `right` is set."""
    state: dict[str, Any] = {"right": True, "calls": 0, "stop": None}

    def say(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int, seed: int) -> list[str]:
        state["calls"] += 1
        if state["calls"] == state["stop"]:
            raise KeyboardInterrupt
        return [" " + " ".join(read(prompt)) if state["right"] else " nobody knows" for prompt in prompts]

    monkeypatch.setattr(long, "generate", say)
    return state


def test_an_oracle_is_right(
    folder: Path, oracle: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every task scores 100 for one that reads, and 0 for one that does not; tables and pictures are written."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ["eval", str(folder), "--suite", "long", "--lengths", "1800", "--rows", "2"]
    assert run_cli(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    page = (folder / "long" / "suite.md").read_text()
    for name in (*LONG_TASKS, "mean"):
        assert f"| {name} | 100.0 |" in page and name in printed
    assert "deadreckon eval" in page and "--suite long" in page and "![Scores by length](suite.png)" in page
    assert (folder / "long" / "suite.png").read_bytes()[:4] == b"\x89PNG"
    scores = json.loads((folder / "long" / "scores.json").read_text())
    assert scores["llama"]["vt"] == {"1800": 1.0}
    oracle["right"] = False
    monkeypatch.setattr(pages, "suite_picture", lambda *words: None)
    other = folder.with_name("other")
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("long"))
    words[1] = str(other)
    assert run_cli(monkeypatch, *words, "--tasks", "passkey,vt", "--beside", str(folder)) == 0
    page = (other / "long" / "suite.md").read_text()
    assert "| vt | 0.0 |" in page and "| vt | 100.0 |" in page and "cwe" not in page
    assert run_cli(monkeypatch, *words, "--beside", str(other)) == 2


def test_a_killed_suite_resumes(folder: Path, oracle: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered is kept, a line that was cut off is not, and the end is that of a run without interruption."""
    monkeypatch.setattr(pages, "suite_picture", lambda *words: None)
    settings: dict[str, Any] = {"tasks": ["passkey", "phonebook"], "rows": 4, "batch_tokens": 2000, "console": quiet()}
    whole = run_suite(folder, [800, 1000], out=folder / "whole", **settings)
    calls, oracle["calls"], oracle["stop"] = oracle["calls"], 0, 3
    with pytest.raises(KeyboardInterrupt):
        run_suite(folder, [800, 1000], **settings)
    path = folder / "long" / "answers.jsonl"
    assert len(path.read_text().splitlines()) == 1 + 4
    with path.open("a") as file:
        file.write('{"task": "passkey", "length": 80')  # cut off
    oracle["calls"], oracle["stop"] = 0, None
    assert run_suite(folder, [800, 1000], **settings) == whole
    assert oracle["calls"] == calls - 2 and path.read_text() == (folder / "whole" / "answers.jsonl").read_text()
    with monkeypatch.context() as patch:  # nothing is asked twice, and no model loaded for nothing
        patch.setattr(pages, "load", lambda *words: pytest.fail("loaded"))
        assert run_suite(folder, [800, 1000], **settings) == whole
    run_suite(folder, [800], **settings | {"rows": 5})
    assert oracle["calls"] == calls  # one more of each task
    assert mean_scores([]) == {}


def test_answers_of_another_model(
    folder: Path, oracle: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "suite_picture", lambda *words: None)
    settings: dict[str, Any] = {"tasks": ["passkey"], "rows": 1, "console": quiet(), "out": tmp_path / "out"}
    run_suite(folder, [800], **settings)
    with pytest.raises(
        ValueError, match=r"out: expected a folder without answers, or with answers to seed 1, got .* 0"
    ):
        run_suite(folder, [800], seed=1, **settings)
    before = fingerprint(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    model.save_pretrained(folder)
    assert fingerprint(folder) != before
    with pytest.raises(ValueError, match="out: expected a folder without answers, or with answers to weights"):
        run_suite(folder, [800], **settings)


def test_sharpened_models_are_others(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are asked as such."""
    monkeypatch.setattr(pages, "suite_picture", lambda *words: None)
    make_model("nope", len(tokenizer)).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    model, _ = pages.load(tmp_path / "saved", "last", "cpu", [800], 64)
    assert model.config.sharpen_beyond == 64
    layers = [layer for layer in model.modules() if isinstance(layer, dr.AttentionLayer)]
    assert layers and all(layer.sharpen_beyond == 64 for layer in layers)
    settings: dict[str, Any] = {"tasks": ["passkey"], "rows": 1, "console": quiet(), "out": tmp_path / "out"}
    run_suite(tmp_path / "saved", [800], **settings)
    with pytest.raises(ValueError, match="out: expected a folder without answers, or with answers to weights"):
        run_suite(tmp_path / "saved", [800], sharpen_beyond=64, **settings)
    with pytest.raises(ValueError, match="sharpen_beyond: expected an integer from 2"):
        run_suite(tmp_path / "saved", [800], sharpen_beyond=1, **settings | {"out": None})
    run_suite(tmp_path / "saved", [800], sharpen_beyond=64, **settings | {"out": None})
    assert [path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()] == ["long-beyond-64"]
    assert "saved beyond 64" in (tmp_path / "saved/long-beyond-64/suite.md").read_text()


def test_data_may_come_later(tmp_path: Path) -> None:
    answer = Answer("vt", 10, 0, 5, None, ["a"], "a", 1.0)
    Answers(tmp_path / "a.jsonl", {"model": "x", "data": []}).add([answer])
    assert Answers(tmp_path / "a.jsonl", {"model": "x", "data": ["b"]}).known == {("vt", 10, 0): answer}
    with pytest.raises(ValueError, match=r"with answers to data \['c'\], got .* with \['b'\]"):
        Answers(tmp_path / "a.jsonl", {"model": "x", "data": ["c"]})


def test_what_cannot_be_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    long_suite = ("--suite", "long")
    for words, message in (
        ((str(tmp_path / "nothing"), *long_suite), "model: expected a folder with config.json"),
        ((str(folder), *long_suite, "--tasks", "chess"), "tasks: expected some of passkey"),
        ((str(folder), *long_suite, "--rows", "0"), "rows: expected 1 or more, got 0"),
        ((str(folder), *long_suite, "--lengths", "200", "--tasks", "vt"), "lengths: expected at least"),
        ((str(folder), *long_suite, "--beside", str(tmp_path)), "beside: expected answers of"),
        (
            (str(folder), *long_suite, "--sharpen-beyond", "64"),
            "sharpen_beyond: expected a model of deadreckon, got",
        ),
    ):
        assert run_cli(monkeypatch, "eval", *words) == 2
        assert message in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert run_cli(monkeypatch, "eval", str(folder), *long_suite) == 2
    assert "model: expected a tokenizer beside the model" in capsys.readouterr().err


def test_means_and_depths() -> None:
    answers = [
        Answer("passkey", length, number, 9, number / 10, [], "", float(length == 100 or number == 5))
        for length in (100, 200) for number in (0, 5, 10) for _ in range(2)
    ] + [Answer("vt", 100, 0, 9, None, [], "", 0.5)]  # fmt: skip
    assert mean_scores(answers) == {
        "passkey": {100: 1.0, 200: pytest.approx(1 / 3)}, "vt": {100: 0.5}, "mean": {100: 0.75},
    }  # fmt: skip
    assert depths(answers) == {0.0: {100: 1, 200: 0}, 0.5: {100: 1, 200: 1}, 1.0: {100: 1, 200: 0}}
    assert pages._names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert pages._names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]


def test_a_recipe_asks_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text with questions is trained on; the suite scores the run, and the command asks its checkpoint."""
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    text = "".join(json.dumps({"text": draw(PhoneBook(), n, 2048, 80).prompt}) + "\n" for n in range(8))
    (tmp_path / "text.jsonl").write_text(text)
    changes = (
        f"options.data={tmp_path / 'text.jsonl'}", f"options.held_out={tmp_path / 'text.jsonl'}", "layers=1",
        "width=16", 'options.tasks=["phonebook"]', "options.vocabulary=600", "length=192", "batch_size=4", "steps=6",
        "evaluate_every=3", "validation_rows=2", "test_lengths=[192, 256]", "test_rows=3", "test_tokens=600",
    )  # fmt: skip
    run = train_run(find_recipe("long-context", "tiny", "fox", 0, changes), tmp_path / "run", console=quiet())
    scores = run.scores()
    assert set(scores) == {(name, length) for name in ("held out", "phonebook") for length in (192, 256)}
    assert scores["phonebook", 192].rows == 3 and scores["phonebook", 256].rows == 2
    assert scores["phonebook", 192].score == 0 and scores["phonebook", 192].measure == "score"
    assert is_better("score", 0.5, 0.2) and format_value("score", 0.5) == "50.0"
    monkeypatch.setattr(long, "generate", lambda *words: pytest.fail("asked again"))
    train_run(run.recipe, tmp_path / "run", console=quiet())
    monkeypatch.undo()
    monkeypatch.setenv("DEADRECKON_CACHE", str(tmp_path / "cache"))
    words = ("--suite", "long", "--tasks", "phonebook", "--lengths", "200", "--rows", "2")
    assert run_cli(monkeypatch, "eval", str(tmp_path / "run"), *words) == 0
    assert len((tmp_path / "run" / "long" / "answers.jsonl").read_text().splitlines()) == 3
    assert Run(tmp_path / "run").finished
