"""SIGTERM: a run saves what it has, then ends; the same command resumes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from small_runs import quiet, small

from deadreckon.lab.training import Run, Step, Training, train_run


def test_a_terminated_run_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("rope", 0, "steps=6", "evaluate_every=6", "log_every=1")
    whole = train_run(recipe, tmp_path / "whole", console=quiet())
    advance, before = Training.advance, signal.getsignal(signal.SIGTERM)

    def terminated(training: Training) -> Step:
        step = advance(training)
        if step.number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr(Training, "advance", terminated)
        train_run(recipe, tmp_path / "a", console=quiet())
    assert ended.value.code == 143 and Run(tmp_path / "a").progress().step == 4
    assert not Run(tmp_path / "a").scores() and signal.getsignal(signal.SIGTERM) is before
    resumed = train_run(recipe, tmp_path / "a", console=quiet())
    assert [line["loss"] for line in resumed.metrics()] == [line["loss"] for line in whole.metrics()]
    assert resumed.scores() == whole.scores()
