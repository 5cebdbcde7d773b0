"""The pages in docs/: their code runs, their links lead somewhere, and they name what there is."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

import deadreckon as dr
from deadreckon.lab import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEED_MORE = {"convert.md", "parallel.md"}  # a checkpoint, several processes: what they say has tests of its own


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


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
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [link for link in links if link and "://" not in link and not (page.parent / link).exists()] == []


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
