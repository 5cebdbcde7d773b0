"""The pages and notebooks in docs/: their code runs, their links work, and the names that they mention exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deadreckon as dr
from deadreckon.lab import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEED_MORE = {"convert.md", "parallel.md"}  # a checkpoint, several processes: what they say has tests of its own


NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))}


def script(path: str) -> Any:
    """A Python file outside the package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebooks, features, site = map(script, ("docs/notebooks.py", "examples/matrix/features.py", "docs/site.py"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def links_of(text: str) -> list[str]:
    """Relative ones, outside code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [link for link in links if link and not re.match(r"\w+:", link)]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in NEED_MORE],
    ids=lambda page: page.name,
)
def test_code_runs(page: Path) -> None:
    names: dict[str, object] = {}
    before = dict(dr.ENCODINGS)
    try:
        for block in blocks(page, "python"):  # those of a page follow each other
            exec(compile(block, str(page), "exec"), names)
    finally:
        dr.ENCODINGS.clear()
        dr.ENCODINGS.update(before)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links_of(page.read_text()) if not (page.parent / link).exists()] == []


def commands() -> list[str]:
    """What the pages say to type, continued lines joined."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith("deadreckon ")]


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for one in vars(cli).values():
        if isinstance(one, type) and one.__module__ == cli.__name__:
            monkeypatch.setattr(one, "run", lambda self: ran.append(self))
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    cli.main()
    assert len(ran) == 1


def test_site_has_every_page_and_every_name() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.name}\n" not in configuration] == []
    reference = (ROOT / "docs" / "api.md").read_text()
    assert re.findall(r"^::: deadreckon\.(\S+)$", reference, re.MULTILINE)
    assert {f"{home}.{name}" for name, home in dr._HOME.items()} == set(
        re.findall(r"^::: deadreckon\.(\S+)$", reference, re.MULTILINE)
    )
    results = (ROOT / "docs" / "results.md").read_text()
    assert [page.name for page in ROOT.glob("results/*.md") if f"results/{page.name}" not in results] == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saved_notebooks_show_what_they_draw(name: str) -> None:
    saved = json.loads(NOTEBOOKS[name].read_text())
    codes = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    shown = notebooks.as_markdown(saved)
    assert shown.startswith("# ") and "data:image/png;base64," in shown
    assert [link for link in links_of(shown) if not (NOTEBOOKS[name].parent / link).exists()] == []
    assert f": notebooks/{name}.md\n" in (ROOT / "mkdocs.yml").read_text()


def test_notebook_of_flipflop_finds_what_it_says() -> None:
    names = notebooks.run(json.loads(NOTEBOOKS["flipflop"].read_text()))
    assert max(names["errors"]["path"].values()) < 0.02
    assert names["errors"]["rope"]["sparse"] > 0.2
    assert names["on_write"]["path"] > 0.5 > names["on_write"]["rope"]


def test_notebook_of_cursors_finds_what_it_says() -> None:
    names = notebooks.run(json.loads(NOTEBOOKS["cursors"].read_text()))
    assert names["reverse"]("8349")[0] == "9438"
    assert names["exact"][8] > 0.9 and names["exact"][60] > 0.5


def test_notebook_cells_show_what_jupyter_would() -> None:
    from matplotlib import pyplot

    sources = ["x = 2\nprint('said')\nx + 1", "x;", "from matplotlib import pyplot\npyplot.plot([x]);"]
    cells = [{"cell_type": "code", "source": [source], "outputs": []} for source in sources]
    pyplot.figure()  # another's
    names = notebooks.run({"cells": cells})
    assert names["x"] == 2
    assert [output["output_type"] for output in cells[0]["outputs"]] == ["stream", "execute_result"]
    assert cells[1]["outputs"] == [] and "image/png" in cells[2]["outputs"][0]["data"]
    shown = notebooks.as_markdown({"cells": cells})
    assert "```text\nsaid\n```" in shown and "```text\n3\n```" in shown


def test_table_of_libraries_is_what_checks_find() -> None:
    lines = (ROOT / "docs" / "rivals.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.count("|") > 5]
    table = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    assert list(table) == list(features.ROWS.values()) and list(rows[0][1:]) == list(features.LIBRARIES)
    flex = f"FlexAttention {version('torch').split('+')[0]}"  # another version finds something else
    for name in ("deadreckon", *(["FlexAttention"] * any(flex in line for line in lines))):
        assert {features.ROWS[row]: cell for row, cell in features.look(name).items()} == {
            title: cells[name] for title, cells in table.items()
        }
    assert {cells["deadreckon"] for cells in table.values()} == {"yes"}


def test_a_library_that_is_not_here_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "retention", None)
    assert set(features.look("retention").values()) == {"not installed"}
    assert features.version_of("no_such_package") == "not installed"


def measured(shape: str, name: str) -> tuple[float, ...]:
    """Milliseconds of forward and backward on the H200, and their ratios to RoPE + FlashAttention-2 and to fla's."""
    text = (ROOT / "results" / "bench-h200.md").read_text()
    tables = [
        [line.strip("| ").split(" | ") for line in part.splitlines()]
        for part in re.findall(r"(?:^\|.*\n)+", text, re.M)
    ]
    for headings, _, *rows in tables:
        for row in rows:
            if row[0] == shape and row[1].strip().partition(" (")[0] == name:
                place = headings.index("forward + backward")
                return tuple(float(cell.split()[0]) for cell in row[place : place + 3] if cell.strip())
    raise AssertionError(f"{shape} {name}: not in results")


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_speed_is_what_results_say(page: str) -> None:
    names = {"learned rotation": "rotation", "the same, of values too": "rotation of values too"}
    rows = re.findall(r"^\| ([\w\-, ]+) \| ([\d.]+) ms \| ([\d.]+) \| ([\d.]*) ?\|$", (ROOT / page).read_text(), re.M)
    found = {names.get(row[0], row[0]): row[1:] for row in rows if "forgets" not in row[0]}
    assert {"rotation", "FoX", "PaTH", "PaTH-FoX", "stick-breaking"} <= found.keys()
    for name, (milliseconds, *ratios) in found.items():
        expected = measured("32x4096x32x64", name)
        assert float(milliseconds) == pytest.approx(expected[0], abs=0.051)
        assert tuple(float(ratio) for ratio in ratios if ratio) == expected[1:]
    long = {name: measured("2x32768x32x64", name)[1] for name in ("PaTH", "PaTH-FoX")}
    text = (ROOT / page).read_text()
    assert all(f"{ratio:.2f}" in text.partition("32 768")[2][:120] for ratio in long.values())


def test_pages_of_the_site_fetch_nothing() -> None:
    page = SimpleNamespace(url="notebooks/cursors.html")
    script = '<script src="https://unpkg.com/iframe-worker/shim"></script><a href="https://example.org">elsewhere</a>'
    assert site.on_post_page(script, page, None).startswith('<script src="../worker.js">')
    assert site.on_post_template(script, "404.html", None).startswith('<script src="worker.js">')
    assert (ROOT / "docs" / "worker.js").exists()
    with pytest.raises(ValueError, match="nothing from other servers"):
        site.on_post_page('<link rel="stylesheet" href="https://example.org/a.css">', page, None)


def test_links_of_pages_are_those_of_the_site() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = "[a](../results/a5.md) [b](notebooks/cursors.ipynb)"
    assert site.on_page_markdown(text, page, None, None) == "[a](results/a5.md) [b](notebooks/cursors.md)"
    page.file.src_uri = "notebooks/cursors.md"
    assert site.on_page_markdown("[a](../../results/a5.md)", page, None, None) == "[a](../results/a5.md)"
