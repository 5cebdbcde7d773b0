"""Histogram filters in C: agreement with the definition, and behaviour without a compiler or a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_histogram import Case, draw, errors, has_compiler, leaves, results
from torch import Tensor

import deadreckon as dr
from deadreckon.filters import library
from deadreckon.filters import native as histogram

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 2), (1, 37, 2, 3), (2, 20, 1, 17), (1, 12, 2, 100), (1, 12, 1, 513)])
def test_the_definition(sizes: tuple[int, ...], copy: bool) -> None:
    case, grad = draw(*sizes, copy=copy), torch.randn(sizes, dtype=torch.float64)

    def run(impl: Any, dtype: torch.dtype) -> list[Tensor]:
        return results(
            lambda **x: dr.histogram_filter(**x, positions=sizes[3], impl=impl), leaves(case, dtype), grad.to(dtype)
        )

    expected = run("reference", torch.float64)
    assert max(errors(run("native", torch.float64), expected)) <= 1e-12
    out, *grads = errors(run("native", torch.float32), expected)
    assert out <= 1e-5 and max(grads) <= 1e-4, (out, grads)


@needs_compiler
def test_any_layout_and_mixed_dtypes() -> None:
    """Also a gradient that is one number, expanded."""
    case = leaves(draw(2, 9, 3, 8, copy=True))
    strided = {
        name: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x.repeat_interleave(2)[::2]
        for name, x in case.items()
    }
    assert not any(x.is_contiguous() for x in strided.values())
    tensors = list(case.values())
    expected, found = (dr.histogram_filter(**x, positions=8, impl="native") for x in (case, strided))
    assert torch.equal(expected, found)
    grads = (torch.autograd.grad(h[..., 1].sum(), tensors) for h in (expected, found))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    mixed = {name: x.to(torch.float32 if name in ("reset", "copy") else x.dtype) for name, x in case.items()}
    h = dr.histogram_filter(**mixed, positions=8, impl="native")
    assert h.dtype == torch.float32
    torch.testing.assert_close(h.double(), expected, rtol=0, atol=1e-6)
    assert torch.autograd.grad(h.sum(), case["move"])[0].dtype == torch.float64


@needs_compiler
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histogram, "GRAIN", 1)
    case, grad = draw(3, 11, 5, 33, copy=True), torch.randn(3, 11, 5, 33)

    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        try:
            inputs = leaves(case, torch.float32)
            return results(lambda **x: dr.histogram_filter(**x, positions=33, impl="native"), inputs, grad)
        finally:
            torch.set_num_threads(1)

    alone = run(1)
    for threads in (2, 3, 32):
        assert all(torch.equal(a, b) for a, b in zip(run(threads), alone, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sharp_and_blunt(dtype: torch.dtype) -> None:
    """Powers far below the smallest number are 0, not a surprise; no power at all is an even spread."""
    case = draw(1, 40, 4, 50)
    case["gamma"] = torch.tensor([0.0, 0.5, 20.0, 300.0], dtype=torch.float64)
    found, expected = (
        dr.histogram_filter(**{n: None if x is None else x.to(dtype) for n, x in case.items()}, positions=50, impl=impl)
        for impl in ("native", "blockwise")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)
    assert (found.double().sum(-1) - 1).abs().max() < 1e-6


@needs_compiler
def test_what_is_no_number_stays_none() -> None:
    """In the histograms of its cursor from its token on, and nowhere else."""
    for wrong in (float("nan"), float("inf"), -1.0):
        case = leaves(draw(1, 6, 2, 20, copy=True), torch.float32)
        with torch.no_grad():
            case["copy"][0, 3, 1, 5] = wrong
            h = dr.histogram_filter(**case, positions=20, impl="native")
        assert h[0, 3:, 1].isnan().all() and not h[0, :3].isnan().any() and not h[0, :, 0].isnan().any()


def test_needs_a_cpu() -> None:
    case = {name: None if x is None else x.to("meta") for name, x in draw(1, 2, 1, 4).items()}
    with pytest.raises(ValueError, match="impl: 'native' needs tensors on a CPU, got meta"):
        dr.histogram_filter(**case, positions=4, impl="native")


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is loaded, nothing is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    histogram._library.cache_clear()
    yield monkeypatch
    histogram._library.cache_clear()


def small() -> Case:
    return {name: None if x is None else x.float() for name, x in draw(1, 2, 1, 4).items()}


def test_without_a_compiler(forgetful: pytest.MonkeyPatch) -> None:
    forgetful.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(ValueError, match="impl: 'native' needs a C compiler: there is no no-such-compiler"):
        dr.histogram_filter(**small(), positions=4, impl="native")
    auto, blockwise = (dr.histogram_filter(**small(), positions=4, impl=impl) for impl in ("auto", "blockwise"))  # type: ignore[call-overload]
    assert torch.equal(auto, blockwise)


def test_with_a_compiler_that_fails(forgetful: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
    broken.chmod(0o755)
    forgetful.setenv("CC", str(broken))
    with pytest.warns(UserWarning, match="histogram filters run on PyTorch.*no licence"):
        h = dr.histogram_filter(**small(), positions=4)
    assert torch.equal(h, dr.histogram_filter(**small(), positions=4, impl="blockwise"))
    with pytest.raises(ValueError, match=r"impl: 'native' needs a C compiler that works: .*no licence"):
        dr.superpose(**small(), table=torch.ones(4, 2), impl="native")


@needs_compiler
def test_libraries_are_kept(forgetful: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder that need not be there; other flags or source are another library; what is damaged is replaced."""
    source, kept = tmp_path / "seven.c", tmp_path / "cache" / "deadreckon" / "native"
    source.write_text("int number(void) { return NUMBER; }\n")
    calls, run = list[list[str]](), subprocess.run

    def count(command: list[str], **options: Any) -> Any:
        calls.append(command)
        return run(command, **options)

    def compiled(number: int) -> int:
        calls.clear()
        assert library.load(source, f"-DNUMBER={number}").number() == number
        return sum("-shared" in command for command in calls)

    forgetful.setattr(subprocess, "run", count)
    assert [compiled(7), compiled(7), compiled(8), compiled(7)] == [1, 0, 1, 0]
    files = sorted(kept.iterdir())
    assert len(files) == 2 and all(x.suffix == ".so" for x in files)
    elsewhere = tmp_path / "other" / "deadreckon" / "native"
    elsewhere.mkdir(parents=True)
    for x in files:
        (elsewhere / x.name).write_text("not a library")
    forgetful.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert [compiled(7), compiled(7)] == [1, 0]
    source.write_text("int number(void) { return NUMBER + 0; }\n")
    assert compiled(7) == 1
    assert len(list(elsewhere.iterdir())) == 3


@needs_compiler
def test_a_cache_folder_that_cannot_be_written(forgetful: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything works, but nothing is kept."""
    (tmp_path / "file").write_text("")
    forgetful.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source = tmp_path / "seven.c"
    source.write_text("int number(void) { return 7; }\n")
    assert library.load(source).number() == 7
    assert (tmp_path / "file").read_text() == ""
    forgetful.delenv("XDG_CACHE_HOME")
    forgetful.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert library.load(source).number() == 7


FORK = """
import os, signal, torch
import deadreckon as dr

def run():
    reset, move = torch.rand(8, 64, 8, requires_grad=True), torch.rand(8, 64, 8, 3).softmax(-1)
    dr.histogram_filter(reset, move, torch.full((8,), 2.0), positions=256, impl="native").square().sum().backward()

torch.set_num_threads(2)
run()
child = os.fork()
if not child:
    signal.alarm(30)  # ends a child that hangs
    run()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_filter_too() -> None:
    """As workers of a DataLoader are: without threads of their own, they must not wait for those of their parent."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "0"
