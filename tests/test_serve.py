"""`examples/serve.py`: every stream gets what it would get alone, whatever else is being served."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_streaming import VOCABULARY, make_model, prompts

PATH = Path(__file__).parent.parent / "examples" / "serve.py"


@pytest.fixture(scope="module")
def serve() -> Any:
    spec = importlib.util.spec_from_file_location("serve", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module
    spec.loader.exec_module(module)
    return module


def test_streams_are_as_alone(serve: Any) -> None:
    """Five requests of different lengths for two rows, after a prefix that they share; one ends early."""
    model = make_model("path-fox")
    prefix, asked = prompts(1, 10)[0].tolist(), [row[: 3 + 2 * n].tolist() for n, row in enumerate(prompts(5, 12))]
    expected = [
        model.generate(torch.tensor([prefix + ids]), max_new_tokens=4 + n, do_sample=False, pad_token_id=0)[0]
        for n, ids in enumerate(asked)
    ]
    answers = [x[len(prefix + ids) :].tolist() for x, ids in zip(expected, asked, strict=True)]
    end = answers[4][1]  # from now on that ends a stream
    model.config.eos_token_id = end
    answers = [a[: a.index(end) + 1] if end in a else a for a in answers]
    server = serve.Server(model, 2, prefix)
    requests = [server.submit(ids, 4 + n) for n, ids in enumerate(asked)]
    assert [list(request) for request in requests] == answers
    with pytest.raises(ValueError, match="expected at least one token each, got 0 and 3"):
        server.submit([], 3)
    with pytest.raises(ValueError, match=f"prompt: expected tokens below {VOCABULARY}, the vocabulary's, got -1"):
        server.submit([1, -1], 3)
    assert list(server.submit([VOCABULARY - 1], 1))
    server.close()
    assert not server.running
    assert server.streams.free == [0, 1]


def test_prompts_are_read_together(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as wait and have rows, while they and their padding are few enough tokens."""
    model = make_model("fox")
    asked = [row[: 3 + 2 * n].tolist() for n, row in enumerate(prompts(5, 12))]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
        for ids in asked
    ]
    monkeypatch.setattr(serve, "READ", 15)
    monkeypatch.setattr(serve.threading.Thread, "start", lambda _: None)
    server, read = serve.Server(model, 4), []
    together = server.streams.read
    monkeypatch.setattr(server.streams, "read", lambda ids: read.append(len(ids)) or together(ids))
    requests = [server.submit(ids, 3) for ids in asked]
    server.waiting.put(None)
    server._run()  # of 3 and 5, then 7, then 9 tokens; the last has no row before the end
    assert read == [2, 1, 1]
    assert [list(request) for request in requests] == [*expected[:4], []]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_server_that_has_failed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    server = serve.Server(make_model("fox"), 2)
    monkeypatch.setattr(server.streams, "step", fail)
    requests = [server.submit([1, 2], 3) for _ in range(3)]
    assert [len(list(request)) < 3 for request in requests] == [True] * 3
    server.thread.join()
    assert list(server.submit([1], 1)) == []


@pytest.mark.integration
def test_transformers_own_server_answers_as_alone(serve: Any) -> None:
    """Beside which the load test is of the same requests."""
    model = serve.random_model("1x64:llama", "cpu")
    asked = [row[: 3 + 2 * n].tolist() for n, row in enumerate(prompts(3, 12))]
    alone = [
        model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
        for ids in asked
    ]
    rival = serve.Rival(model, 1000)
    requests = [rival.submit(ids, 3) for ids in asked]
    assert [list(request) for request in requests] == alone
    rival.close()


class Letters:
    """A tokenizer whose tokens 1 and 2 are half a character each."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes({1: 0xC3, 2: 0xA9}.get(token, 96 + token) for token in tokens).decode(errors="replace")


def test_text_comes_in_whole_characters(serve: Any) -> None:
    request = serve.Request([1], 5)
    for token in (3, 1, 2, 4, serve.END):
        request.answers.put(token)
    assert list(serve.text_of(request, Letters())) == ["c", "é", "d"]
