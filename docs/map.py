"""Draws the map of the package from its imports: `python docs/map.py` writes docs/map.png.

Floors (layers of the architecture) from top to bottom, each importing only from those below; inside a floor its rooms,
the folders and files. An arrow for every floor that imports another, as wide as it has files that do.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
FLOORS = {
    "lab": "experiments, benchmarks, probes: the command line",
    "tasks": "one task a file; texts and tokens",
    "models": "attention layer, states and KV cache, the Hugging Face model",
    "encodings": "one encoding a file",
    "filters": "PRISM's histogram filter: PyTorch, C, Triton",
    "ops": "the equation: attend, attend_next",
}
COLOURS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#fce5cd", "#ead1dc", "#d9d2e9")
HEIGHT, WIDTH = 1.5, 13.0


def rooms() -> dict[str, list[str]]:
    """The folders and loose files of each floor, with how many lines they have."""
    found: dict[str, list[str]] = {}
    for floor in FLOORS:
        lines: Counter[str] = Counter()
        for path in sorted((ROOT / "deadreckon" / floor).rglob("*.py")):
            inside = path.relative_to(ROOT / "deadreckon" / floor)
            if path.name != "__init__.py":
                lines[f"{inside.parts[0]}/" if len(inside.parts) > 1 else inside.stem] += len(
                    path.read_text().split("\n")
                )
        folders = [f"{name}\n{count}" for name, count in lines.items() if name.endswith("/")]
        files = [f"{name}\n{count}" for name, count in lines.items() if not name.endswith("/")]
        if len(files) > 6:
            total = sum(count for name, count in lines.items() if not name.endswith("/"))
            files = [f"{len(files)} files\n{total}"]
        found[floor] = folders + files
    return found


def arrows() -> Counter[tuple[str, str]]:
    """(from, to) floors -> number of files in one that import the other. Public names count where they are defined."""
    homes = ast.literal_eval((ROOT / "deadreckon/__init__.py").read_text().split("_HOME = ")[1].split("\n}")[0] + "\n}")
    users: defaultdict[tuple[str, str], set[Path]] = defaultdict(set)
    for floor in FLOORS:
        for path in (ROOT / "deadreckon" / floor).rglob("*.py"):
            text = path.read_text()
            targets = {homes[name].split(".")[0] for name in homes if f"dr.{name}" in text}
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deadreckon."):
                    targets.add(str(node.module).split(".")[1])
                elif isinstance(node, ast.ImportFrom) and node.module == "deadreckon":
                    targets |= {homes[alias.name].split(".")[0] for alias in node.names if alias.name in homes}
            for target in targets & FLOORS.keys() - {floor}:
                users[floor, target].add(path)
    return Counter({pair: len(paths) for pair, paths in users.items()})


def draw(to: Path) -> None:
    figure, axes = plt.subplots(figsize=(11.5, 8.2))
    places = {floor: (len(FLOORS) - 1 - i) * (HEIGHT + 0.55) for i, floor in enumerate(FLOORS)}
    for (floor, inside), colour in zip(rooms().items(), COLOURS, strict=True):
        y = places[floor]
        axes.add_patch(FancyBboxPatch((0, y), WIDTH, HEIGHT, boxstyle="round,pad=0.06", fc=colour, ec="#666666"))
        axes.text(0.1, y + HEIGHT - 0.05, f"{floor}/", weight="bold", va="top", fontsize=12)
        axes.text(2.4, y + HEIGHT - 0.07, FLOORS[floor], va="top", fontsize=10, color="#333333")
        step = WIDTH / len(inside)
        for i, room in enumerate(inside):
            box = (i * step + 0.08, y + 0.06)
            axes.add_patch(FancyBboxPatch(box, step - 0.16, 0.78, boxstyle="round,pad=0.02", fc="white", ec="#aaaaaa"))
            axes.text(
                box[0] + step / 2 - 0.08, y + 0.45, room, ha="center", va="center", fontsize=8 if step > 1.3 else 6.5
            )
    pairs = sorted(arrows().items(), key=lambda pair: places[pair[0][0]] - places[pair[0][1]])
    for number, ((above, below), files) in enumerate(pairs):
        x = WIDTH + 0.45 + 0.42 * number
        start, end = (WIDTH + 0.1, places[above] + HEIGHT / 2), (WIDTH + 0.1, places[below] + HEIGHT / 2)
        line = FancyArrowPatch(
            start, end, connectionstyle=f"bar,armA=0,armB=0,fraction={-(x - WIDTH) / (start[1] - end[1]):.3f}",
            arrowstyle="-|>", mutation_scale=11, lw=0.8 + 0.08 * min(files, 30), color="#555555",
        )  # fmt: skip
        axes.add_patch(line)
        label = {"fontsize": 8, "color": "#333333", "va": "center", "ha": "center"}
        axes.text(x + 0.02, (start[1] + end[1]) / 2, str(files), **label, bbox={"fc": "white", "ec": "none", "pad": 1})
    axes.set_xlim(-0.2, WIDTH + 0.9 + 0.42 * len(pairs))
    axes.set_ylim(-0.3, max(places.values()) + HEIGHT + 0.3)
    axes.axis("off")
    figure.savefig(to, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(__file__).with_name("map.png"))
