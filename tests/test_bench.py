"""Benchmarks of operators: checks before timing, contents of tables, and the command line."""

from __future__ import annotations

import pickle
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from small_runs import rows_of, run_cli
from worlds import prepared

from deadreckon.lab.arguments import sizes_in
from deadreckon.lab.bench import attention, cases, filters
from deadreckon.lab.bench.attention import Figures
from deadreckon.lab.bench.cases import Shape
from deadreckon.lab.bench.drift import in_place_drift, model_drift
from deadreckon.lab.bench.flags import Attention, Benchmark, Filters, Powers
from deadreckon.lab.bench.rivals import RIVALS, Inputs, Method, documents_apart, sdpa
from deadreckon.lab.bench.timing import kernel_seconds, peak_bytes, seconds_per_step

SHORT = Shape(1, 40, 2, 16)


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two leaves of 64 tokens: what is wrong there is wrong at the lengths that benchmarks are checked at."""
    monkeypatch.setitem(cases.CHECKS, "cpu", ((70, 1.0), (100, 50.0)))


def bench(*shapes: Shape, **flags: Any) -> dict[Shape, attention.Results]:
    return attention.run(Attention(shapes=tuple(map(str, shapes)), rounds=1, **flags))


def test_bench_prints_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = (Shape(1, 64, 2, 16), Shape(2, 70, 1, 16))
    found = bench(*shapes, save=tmp_path / "bench.md")
    assert list(found) == list(shapes)
    assert {"PaTH", "PaTH-FoX", "FoX", "RoPE", "rotation", "Power(2)", "causal SDPA"} <= set(found[shapes[0]])
    page = (tmp_path / "bench.md").read_text()
    assert page.count("| 2x70x1x16 |") == len(found[shapes[1]])
    assert "torch 2" in page
    assert "    deadreckon bench attention --device cpu --shapes 1x64x2x16 2x70x1x16 --rounds 1\n" in page
    assert page.splitlines()[-1].replace("|", "").split() == capsys.readouterr().out.splitlines()[-1].split()
    with pytest.raises(ValueError, match="device: expected one that is here"):
        bench(*shapes, device="cuda")
    assert run_cli(monkeypatch, "bench", "attention", "--lengths", "40", "--rounds", "1", "--only", "pow(2)") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "only: expected names among causal SDPA, RoPE," in error and error.endswith("got pow(2)")
    assert run_cli(monkeypatch, "bench", "attention", "--rounds", "0") == 2
    assert "rounds: expected 1 or more, got 0" in capsys.readouterr().err


def test_packed_rows_are_timed(tmp_path: Path) -> None:
    page = tmp_path / "bench.md"
    found = attention.run(Attention(documents="30, 90", row="200x2x16", rounds=1, save=page))
    assert [shape.documents for shape in found] == [30, 90]
    assert list(found[Shape(1, 200, 2, 16, 90)]) == list(attention.line_up("cpu", packed=True))
    assert [row[4::2] for row in rows_of(page.read_text(), "causal SDPA by document")] == [["1.00"] * 3] * 2
    assert rows_of(page.read_text(), "1x200x2x16 / 90", "PaTH-FoX")
    across = Method(sdpa, "attention")  # attends across documents
    assert max(cases.check(across, 16, packed=False, device="cpu").values()) <= 1
    assert cases.check(across, 16, packed=True, device="cpu")["output"] > 1
    assert max(cases.check(Method(documents_apart, "attention"), 16, packed=True, device="cpu").values()) <= 1
    for flags, message in (
        ({"documents": "600,x"}, "documents: expected mean lengths, such as 512,4096, got 'x'"),
        ({"documents": "9", "row": "100x16"}, "row: expected TxHxD, got '100x16'"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.run(Attention(**flags))


def test_documents_have_exponential_lengths() -> None:
    bounds = cases.boundaries(100_000, 50)
    lengths = bounds.diff().double()
    assert bounds[0] == 0 and bounds[-1] == 100_000 and lengths.min() > 0
    # Rounded up: half a token more. The mean of n exponential lengths is 50 / √n off, and so is their deviation.
    assert float(lengths.mean()) == pytest.approx(50.5, abs=4 * 50 / len(lengths) ** 0.5)
    assert float(lengths.std()) == pytest.approx(50, abs=6 * 50 / len(lengths) ** 0.5)
    assert cases.boundaries(7, 10_000).tolist() == [0, 7]


def test_sticks_in_reach() -> None:
    length, width = 200, 16
    q = torch.ones(1, length, 1, width)
    for logit, tiles in ((-20.0, 10), (20.0, 7)):  # all of the triangle; a tile and, for its first row, the one before
        k = torch.full_like(q, logit / width**0.5)
        assert cases.sticks_in_reach(q, k) == pytest.approx(tiles / 10)


@pytest.mark.parametrize("flags", get_args(Benchmark))
def test_commands_give_the_flags_back(flags: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's command, typed, is the run that wrote it."""
    other = {"int": 7, "bool": True, "str": "a b,c", "tuple[int, ...]": (3, 4), "tuple[str, ...]": ("x", "y")}
    modes = {"tuple[Mode, ...]": ("compiled", "eager"), "Form": "attention"}
    changed = {
        field.name: (other | modes)[str(field.type)] for field in fields(flags) if field.name not in ("device", "save")
    }
    given, seen = flags(**changed), list[Any]()
    monkeypatch.setattr(f"deadreckon.lab.bench.{given.name}.run", seen.append)
    for chosen in (given, flags()):
        run_cli(monkeypatch, *shlex.split(chosen.command())[1:])
        assert seen.pop() == chosen


def test_forms_are_of_whole_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_cli(monkeypatch, "bench", "powers", "--form", "chunked")
    assert "form: expected with --models only, got 'chunked'" in capsys.readouterr().err


def test_flags_are_light() -> None:
    """The command line imports them for every command."""
    code = "import sys, deadreckon.lab.bench.flags; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bench_alone_is_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    monkeypatch.setattr(attention, "run", seen.append)
    run_cli(monkeypatch, "bench")
    assert seen == [Attention()]


def test_filters_are_checked_then_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Filters(size="2x9x2x6x4", rounds=1, save=tmp_path / "filters.md")
    filters.run(flags)
    page = (tmp_path / "filters.md").read_text()
    assert page.startswith("# Histogram filters on ")
    assert "deadreckon bench filters --device cpu --size 2x9x2x6x4 --rounds 1" in page
    assert page.count("| loop of scatter_add |") == page.count("| PyTorch |") == 2
    assert page.count("| C |") == 2 * filters.serves("native", "cpu")
    draw = filters.draw

    def small(size: filters.Size, *rest: Any) -> Any:
        if size.batch > 1:
            raise torch.OutOfMemoryError
        return draw(size, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(filters, "draw", small)
        remark = filters.measure(filters.Size(2, 9, 2, 6, 4), None, "reference", 1, "cpu")[2]
    assert remark == ", scaled up from batch 1"
    monkeypatch.setattr(
        filters, "run_once", lambda gates, table, grad, impl: [x + (impl != "reference") for x in (grad, *gates)]
    )
    with pytest.raises(RuntimeError, match=r"PyTorch is off by .* nothing was timed"):
        filters.run(flags)


def test_bench_parses_shapes() -> None:
    assert Shape.parse("32x4096X8x64") == Shape(32, 4096, 8, 64)
    assert str(Shape(32, 4096, 8, 64)) == "32x4096x8x64"
    for given in ("32x4096x8", "32x4096x8x64x2", "32xTx8x64", "0x1x1x2", "", "-1x1x1x2"):
        with pytest.raises(ValueError, match="shapes: expected BxTxHxD, such as 32x4096x32x64, got"):
            Shape.parse(given)
    assert sizes_in("24x1024", "sizes", "LxW") == (24, 1024)


def test_bench_names_what_is_wrong_with_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(x: Inputs) -> torch.Tensor:
        raise NotImplementedError("no [kernel] | here\nand more")

    def fail_later(x: Inputs) -> torch.Tensor:
        if x["q"].shape[1] == 40:  # not where it is checked
            raise MemoryError("too long")
        return sdpa(x)

    rivals = {
        "SDPA": Method(sdpa, "attention"),
        "ungated": Method(sdpa, "FoX"),
        "fla FoX": Method(lambda x: cases.attend("FoX", "blockwise", x), "FoX"),
        "broken": Method(fail, "PaTH"),
        "short": Method(fail_later, "attention"),
        "absent": Method(fail, "attention", "no_such_package"),
    }
    monkeypatch.setitem(RIVALS, "cpu", rivals)
    found = bench(SHORT, save=tmp_path / "bench.md")[SHORT]
    assert found["broken"] == "failed: NotImplementedError: no [kernel] | here"
    assert found["short"] == "failed: MemoryError: too long"
    assert "absent" not in found
    page = (tmp_path / "bench.md").read_text()
    assert "not installed: absent" in page
    names = {row[1]: row[2:] for row in rows_of(page, "1x40x2x16")}
    assert names["SDPA"][2::3] == ["1.00", "1.00", "1.00"]
    assert [bool(cell) for cell in names["FoX"][3::3]] == [True, True, True]  # beside fla's
    assert [bool(cell) for cell in names["PaTH"][3::3]] == [False, False, False]
    assert "✗" in names["ungated"][0] and "✗" not in names["fla FoX"][0]
    assert "broken (failed: NotImplementedError: no [kernel] \\| here)" in page
    assert "failed: MemoryError: too long" in capsys.readouterr().out


def test_bench_times_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(bench(SHORT, only="path, FOX")[SHORT]) == ["causal SDPA", "FoX", "PaTH"]
    truly = cases.attend
    monkeypatch.setattr(cases, "attend", lambda kind, impl, x: truly("FoX" if impl == "auto" else kind, impl, x))
    with pytest.raises(RuntimeError, match="nothing was timed: PaTH at D = 16: output off by"):
        bench(SHORT, only="PaTH")


def test_bench_shows_where_the_time_goes(tmp_path: Path) -> None:
    page = tmp_path / "bench.md"
    bench(SHORT, only="PaTH", save=page, profile=True)
    _, section = page.read_text().split("PaTH, 1x40x2x16: forward and backward:")  # ours alone
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[4:]]
    assert "--only PaTH --profile" in page.read_text() and any(name.startswith("aten::") for name, *_ in rows)
    times = [float(time.removesuffix(" ms")) for _, time, *_ in rows]
    assert rows[-1][0] == "all" and times[:-1] == sorted(times[:-1], reverse=True)
    assert 0 < sum(times[:-1]) <= 1.01 * times[-1] + 0.005 * len(times)
    assert all(int(count) > 0 for *_, count in rows[:-1])


def test_bench_checks_in_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "get_context", lambda _: prepared())  # new processes, but for seconds of imports
    methods = {"PaTH": attention.line_up("cpu", packed=False)["PaTH"], "wrong": Method(sdpa, "FoX")}
    what = (16, False)
    alone, together = (attention.check_all({False: methods}, [what], "cpu", workers) for workers in (1, 2))
    assert list(alone[what]) == list(together[what])
    for name, error in alone[what].items():
        assert together[what][name] == pytest.approx(error, rel=0.5)
    assert together[what]["wrong"] > 1 > together[what]["PaTH"]


@pytest.mark.parametrize("packed", [False, True])
def test_methods_can_be_sent_to_other_processes(packed: bool) -> None:
    for method in attention.everyone("cuda", packed).values():
        assert pickle.loads(pickle.dumps(method)).kind == method.kind


@pytest.mark.gpu
def test_bench_on_cuda() -> None:
    shape = Shape(1, 300, 2, 64)
    found = bench(shape, device="cuda", only="cuDNN,FlashAttention-2,RoPE,PaTH")[shape]
    packed = attention.run(Attention("cuda", documents="100", row="300x2x64", rounds=1, only="PaTH"))
    assert [len(some) for some in (found, *packed.values())] == [5, 2]
    for figures in (*found.values(), *packed[Shape(1, 300, 2, 64, 100)].values()):
        assert isinstance(figures, Figures) and figures.forward < figures.both


def test_peak_bytes_sees_what_is_held() -> None:
    def hold() -> None:
        first = torch.zeros(1 << 20)
        second = torch.zeros(1 << 20)
        del first, second
        torch.zeros(1 << 18)

    assert 8 << 20 <= peak_bytes(hold) < 9 << 20


def test_steps_are_timed_after_as_many() -> None:
    seen = list[int]()
    assert seconds_per_step(seen.append, 3, "cpu") > 0
    assert seen == [0, 1, 2, 3, 4, 5]


def test_drift_tells_the_two_ways_apart() -> None:
    once, streamed = model_drift(70, 8, "cpu")
    assert 0 < streamed < 1.5 * once < 0.05
    rounded, in_place = in_place_drift(200, 8, "cpu")
    assert in_place > 2 * rounded > 0


@pytest.mark.parametrize("forms", [True, False])
def test_powers(
    forms: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "powers.md"
    flags = Powers(width=8, heads=1, rounds=1, lengths=(64, 128), forms=forms, save=page)
    run_cli(monkeypatch, *flags.command().split()[1:], "--save", str(page))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["64", "128"]
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 4 and ("attention" in lines[0]) == forms
    assert ("1.78" in lines[2]) == forms  # of 36 dimensions


def test_whole_models_with_powers_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "powers.md"
    words = ("--models", "--width", "8", "--rounds", "1", "--lengths", "32", "--save", str(page))
    assert run_cli(monkeypatch, "bench", "powers", *words) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines()[-3:]]
    assert [row[0] for row in rows] == ["sympow, 32", "sympow-gated, 32", "conformal-sympow, 32"]
    assert rows[0][3] == "1.00" and all(float(row[3]) > 0 and row[4:] == ["", ""] for row in rows)  # no kernels


@pytest.mark.gpu
def test_kernels_alone_are_what_the_gpu_does() -> None:
    """One product of 4096 × 4096 takes no less than at a petaflop; ten of them have ten times its kernels' time."""
    x = torch.randn(4096, 4096, device="cuda")
    one, ten = (kernel_seconds(lambda n=n: [x @ x for _ in range(n)], 3) for n in (1, 10))  # type: ignore[misc]
    assert one > 2 * 4096**3 / 1e15 and ten == pytest.approx(10 * one, rel=0.5)
