"""Model cards: what `train` and `convert` write beside weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from small_runs import SMALL, run_cli

from deadreckon.lab.pages.card import card, licence_of, run_card
from deadreckon.lab.training import Run

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05", "command": "deadreckon train x", "device": "cpu", "python": "3.11.1",
    "versions": {"torch": "2.13.0"}, "commit": None,
}  # fmt: skip


def test_train_writes_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "train",
        "flipflop",
        "--encoding",
        "fox",
        "--out",
        str(tmp_path / "run"),
        "--export",
        str(tmp_path / "new"),
    ]
    assert run_cli(monkeypatch, *words, "--change", *SMALL, "steps=4", "evaluate_every=2") == 0
    run = Run(tmp_path / "run")
    for kind in ("last", "best"):
        text = (run.path / kind / "README.md").read_text()
        data = ModelCard(text).data
        assert (data.license, data.tags, data.library_name) == ("unknown", ["deadreckon"], "transformers")
        assert "`fox`" in text and "4 of 4 steps" in text and '"learning_rate"' in text and "trust_remote_code" in text
        assert f"    deadreckon {' '.join(words)}" in text and "torch 2." in text
        assert ("| as trained: error, %" in text) == bool(run.scores(kind))
    assert run.scores() and "the last checkpoint, of step 4." in run_card(run)
    kept = run.path / "best" / "score.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"step": 2}))
    assert "the best checkpoint by error, of step 2." in run_card(run, "best")
    assert (tmp_path / "new" / "README.md").read_text() == (run.path / "last" / "README.md").read_text()


def test_a_card_of_a_stated_licence_asks_for_none(tmp_path: Path) -> None:
    text = card("A title", {"": "About."}, ENVIRONMENT, base="some/model", data="Books.", licence="apache-2.0")
    data = ModelCard(text).data
    assert (data.license, data.base_model) == ("apache-2.0", "some/model") and "say one" not in text
    assert re.search(r"^# A title\n\nAbout\.\n", text, re.MULTILINE) and "Books." in text
    (tmp_path / "README.md").write_text(text)
    assert licence_of(str(tmp_path)) == "apache-2.0"
    assert licence_of("") == licence_of(str(tmp_path / "none")) == "unknown"
    assert "say one above" in card("A title", {"": "About."}, ENVIRONMENT)
