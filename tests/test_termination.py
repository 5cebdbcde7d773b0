"""SIGTERM and Ctrl-C: a run saves a checkpoint, then ends; the same command resumes it, and says so."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
from small_runs import quiet, run_cli, small

from deadreckon.lab import cli
from deadreckon.lab.training import Run, Step, Training, train_run
from deadreckon.lab.training.parallel import _begin
from deadreckon.lab.training.trainer import noticing_signals


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Also where tests run in the background, with SIGINT ignored, which processes inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_run_that_is_ended_loses_no_step(
    number: signal.Signals, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small("rope", 0, "steps=6", "evaluate_every=6", "log_every=1")
    whole = train_run(recipe, tmp_path / "whole", console=quiet())
    advance, before = Training.advance, signal.getsignal(number)

    def ended(training: Training) -> Step:
        step = advance(training)
        if step.number == 4:
            os.kill(os.getpid(), number)
        return step

    with monkeypatch.context() as patched, pytest.raises(kind) as stop:
        patched.setattr(Training, "advance", ended)
        train_run(recipe, tmp_path / "a", console=quiet())
    assert number == signal.SIGINT or stop.value.code == 143
    assert Run(tmp_path / "a").progress().step == 4
    assert not Run(tmp_path / "a").scores() and signal.getsignal(number) is before
    resumed = train_run(recipe, tmp_path / "a", console=quiet())
    assert [line["loss"] for line in resumed.metrics()] == [line["loss"] for line in whole.metrics()]
    assert resumed.scores() == whole.scores()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("rope", 0, "steps=6", "evaluate_every=6", "log_every=1")
    went_on = []

    def impatient(training: Training) -> Step:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        went_on.append(True)
        raise AssertionError

    monkeypatch.setattr(Training, "advance", impatient)
    with pytest.raises(KeyboardInterrupt):
        train_run(recipe, tmp_path / "a", console=quiet())
    assert not went_on and Run(tmp_path / "a").progress().step == 0


def test_ctrl_c_ends_a_command_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["train", "flipflop", "--encoding", "rope", "--out", str(tmp_path / "run")]
    sizes = ["--change", "steps=100000", "length=8", "batch_size=2", "width=16"]
    command = [sys.executable, "-m", "deadreckon", *words, *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert f"To resume, run the same command again:\n  python -m deadreckon {' '.join(words)}" in errors
    assert "was interrupted at step" in said and Run(tmp_path / "run").progress().step > 0


def test_ctrl_c_in_a_command_that_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: cli.List) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.List, "run", interrupted)
    assert run_cli(monkeypatch, "list") == 130
    assert capsys.readouterr().err == "Interrupted. Nothing is kept; to start again:\n  deadreckon list\n"


def idle_after_a_run(disturbed: bool) -> None:
    """A worker that has trained a run is told to end; `disturbed`: a library has put back the handler it had found."""
    _begin("cpu", 1)
    sigaction, found = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(1024)
    with noticing_signals():
        sigaction(signal.SIGTERM, None, found)
    if disturbed:
        sigaction(signal.SIGTERM, found, None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)  # it comes between two instructions


@pytest.mark.parametrize("disturbed", [False, True])
def test_an_idle_worker_ends_when_it_is_told_to(disturbed: bool) -> None:
    worker = get_context("spawn").Process(target=idle_after_a_run, args=(disturbed,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 143
