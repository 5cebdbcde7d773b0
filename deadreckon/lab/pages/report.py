"""`deadreckon report`: a self-contained HTML page on runs, readable on a phone and on paper."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import deadreckon as dr
from deadreckon.lab.files import write_text
from deadreckon.lab.pages.comparison import Comparison, alike, gather
from deadreckon.lab.pages.tables import html
from deadreckon.lab.recipes import title_of
from deadreckon.lab.training import Run, find_runs
from deadreckon.lab.training.display import format_seconds

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; } .best { font-weight: bold; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; background: white; } figure { margin: 1rem 0; }
pre { overflow-x: auto; font-size: .8rem; } details { margin: .75rem 0; }
"""


def write_report(paths: Sequence[Path], output: Path) -> int:
    """Writes a page on all runs in these folders; returns their number."""
    order = list(dr.ENCODINGS)
    runs = sorted(find_runs(paths), key=lambda run: (order.index(run.recipe.encoding), run.recipe.seed))
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(alike(run.recipe).to_dict(), sort_keys=True), []).append(run)
    sections = [_section(group) for group in groups.values()]
    body = f"<h1>{len(runs)} runs, {len(groups)} recipe{'s' * (len(groups) > 1)}</h1>" + "".join(sections)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>deadreckon: {len(runs)} runs</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
    write_text(output, page)
    return len(runs)


def _section(runs: list[Run]) -> str:
    """The section on the runs of one recipe."""
    recipe = runs[0].recipe
    folders = sorted({str(run.path.parent) for run in runs})
    comparison = gather(", ".join(folders), runs)
    title = f"{recipe.task}: {', '.join(dict.fromkeys(run.recipe.encoding for run in runs))}"
    parts = [f"<h2>{escape(title)}</h2><p>{escape(', '.join(folders))}</p>"]
    parts += [_scores(comparison, condition) for condition in comparison.tabulated]
    shown = json.dumps({**recipe.to_dict(), "encoding": "…", "seed": "…"}, indent=2, ensure_ascii=False)
    parts += [_learning(comparison), _runs(runs), _details("Recipe", f"<pre>{escape(shown)}</pre>"), _environment(runs)]
    return "".join(parts)


def _scores(comparison: Comparison, condition: str) -> str:
    from deadreckon.lab.pages.pictures import scores_svg

    lengths = comparison.lengths(condition)
    best = {length: comparison.best(condition, length) for length in lengths}
    rows = [
        [title_of(name), *((comparison.cell(name, condition, length), best[length] == name) for length in lengths)]
        for name in comparison.values
    ]
    heading = comparison.describe(condition)
    picture = _picture(scores_svg(comparison, condition), heading)
    return f"<h3>{escape(heading)}</h3>{picture}{html(['encoding', *map(str, lengths)], rows)}"


def _learning(comparison: Comparison) -> str:
    from deadreckon.lab.pages.pictures import learning_svg

    curves: dict[str, list[tuple[list[int], list[float]]]] = {}
    for label, runs in comparison.runs.items():
        for run in runs:
            points = [(line["step"], line["loss"]) for line in run.metrics() if line["loss"] is not None]
            if thin := points[:: max(1, len(points) // 500)]:
                curves.setdefault(label, []).append(([step for step, _ in thin], [loss for _, loss in thin]))
    if not curves:
        return ""
    return f"<h3>Learning</h3>{_picture(learning_svg(curves), 'Loss while training')}"


def _runs(runs: list[Run]) -> str:
    rows: list[list[Any]] = []
    for run in runs:
        progress = run.progress()
        state = f"{progress.step}" if run.finished else f"{progress.step} of {run.recipe.steps}"
        row = [run.recipe.encoding, run.recipe.seed, state, f"{progress.tokens:,}", format_seconds(progress.seconds)]
        rows.append([run.path, *row, len(run.starts())])
    headings = ["run", "encoding", "seed", "steps", "tokens", "time", "starts"]
    return f"<h3>Runs</h3>{html(headings, rows)}"


def _environment(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        for start in run.starts():
            versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
            machine = f"{start['device']}, {start['threads']} threads"
            words = [start["date"], start["command"], machine, f"python {start['python']}, {versions}"]
            rows.append([run.path.name, *words, start["commit"] or "no commit known"])
    headings = ["run", "started", "command", "machine", "versions", "commit"]
    return _details("Environment", html(headings, rows, "words"))


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _picture(svg: str, title: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<figure><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}"></figure>'
