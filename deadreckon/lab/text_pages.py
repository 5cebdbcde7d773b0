"""Pages of results of small language models: what `rotation_table` and `power_figures` have saved, and a picture.

    python -m deadreckon.lab.text_pages rotation-0.json rotation-1.json --page results/rotations.md

Files of one command may differ in the seed, or in what they hold of one comparison. The picture lies beside the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from deadreckon.lab.markdown import table
from deadreckon.lab.power_figures import mean_loss
from deadreckon.lab.recipes import title_of
from deadreckon.lab.rotation_table import REPORTED

Found = dict[str, Any]


def read(paths: Sequence[Path]) -> tuple[Found, list[Found]]:
    """What all files have in common, and their runs, each with its seed."""
    settings: Found = {}
    runs: list[Found] = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
            known, found = data["settings"], data["runs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"results: expected a file that rotation_table or power_figures saved, got {path}"
            ) from error
        seed = known.pop("seed")
        if settings and {**settings, "longest": 0} != {**known, "longest": 0}:
            raise ValueError(f"results: expected files of one comparison, got other settings in {path}")
        settings = known
        runs += [{**run, "seed": seed} for run in found.values()]
    if not runs:
        raise ValueError(f"results: expected finished runs, got none in {', '.join(map(str, paths))}")
    return settings, runs


def name_of(run: Found) -> str:
    """The encoding, with its options."""
    return " ".join([title_of(run["encoding"]), *(f"{key} = {value}" for key, value in run["options"])])


def by_name(runs: Sequence[Found]) -> dict[str, list[Found]]:
    """Runs of one encoding together, in the order they come."""
    found: dict[str, list[Found]] = {}
    for run in runs:
        found.setdefault(name_of(run), []).append(run)
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and, of several, standard deviation."""
    if not values:
        return ""
    middle = f"{mean(values):.{digits}f}" if mean(values) < 1e4 else f"{mean(values):.1e}"
    return middle if len(values) == 1 else f"{middle} ± {stdev(values):.{digits}f}"


def perplexities(runs: Sequence[Found]) -> dict[tuple[int, bool], list[float]]:
    """Of one encoding, by length and whether a window slides, one for each seed."""
    found: dict[tuple[int, bool], list[float]] = {}
    for run in runs:
        for score in run["scores"]:
            found.setdefault((score["length"], score["window"] is not None), []).append(score["perplexity"])
    return found


def rotation_tables(runs: Sequence[Found]) -> list[str]:
    """Perplexity by length: over whole rows, and with a window."""
    named = {name: perplexities(some) for name, some in by_name(runs).items()}
    parts = []
    for sliding, title in ((False, "Perplexity by length"), (True, "The same with a window of the training length")):
        lengths = sorted({length for found in named.values() for length, slides in found if slides == sliding})
        rows = [
            [name, *(spread(found.get((length, sliding), []), 2) for length in lengths)]
            for name, found in named.items()
        ]
        parts += [f"{title}:", "", table(["", *lengths], rows), ""] if lengths else []
    told = {run["encoding"]: REPORTED[run["encoding"]] for run in runs if run["encoding"] in REPORTED}
    lengths = sorted({length for found in told.values() for length in found})
    rows = [
        [title_of(name), *(f"{found[length]:.2f}" if length in found else "" for length in lengths)]
        for name, found in told.items()
    ]
    title = "The paper's, of 16 layers of 768 after 3.3 billion tokens of OpenWebText, over whole rows"
    return [*parts, f"{title}:", "", table(["", *lengths], rows), ""] if rows else parts


def power_tables(runs: Sequence[Found]) -> list[str]:
    """Loss by the context that was trained on: at the end of training, and on other text within it and beyond."""
    contexts = sorted({run["length"] for run in runs})
    parts = []
    for title, value in (
        ("Loss over the last tenth of training, by context", lambda run: run["loss"]),
        ("On other text, within the context", lambda run: mean_loss(_within(run))),
        ("Beyond it", lambda run: mean_loss(_beyond(run))),
    ):
        rows = [
            [name, *(spread([value(run) for run in some if run["length"] == context], 4) for context in contexts)]
            for name, some in by_name(runs).items()
        ]
        parts += [f"{title}:", "", table(["", *contexts], rows), ""]
    return parts


def _within(run: Found) -> list[Found]:
    return [score for score in run["positions"] if score["last"] <= run["length"]]


def _beyond(run: Found) -> list[Found]:
    return [score for score in run["positions"] if score["first"] > run["length"]]


def draw(settings: Found, runs: Sequence[Found], path: Path) -> None:
    """Perplexity against length; or loss against context, and against position for the longest context."""
    from deadreckon.lab.pictures import COLOURS, MARKERS, PLAIN, plt

    looks = dict(zip(by_name(runs), zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    with plt.rc_context(PLAIN):
        if "window" in settings:
            figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
            for name, some in by_name(runs).items():
                found = sorted(
                    (length, mean(values)) for (length, slides), values in perplexities(some).items() if not slides
                )
                axes.plot(*zip(*found, strict=True), color=looks[name][0], marker=looks[name][1], label=name)
            axes.axvline(runs[0]["length"], color="#555555", linestyle="--", linewidth=1)
            axes.set(xscale="log", yscale="log", xlabel="tokens of a row", ylabel="perplexity")
            axes.set_title("trained at the dashed line")
            _name_ticks(axes, {length for length, _ in perplexities(runs)})
        else:
            figure, (axes, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
            longest = max(run["length"] for run in runs)
            for name, some in by_name(runs).items():
                colour, marker = looks[name]
                contexts = sorted({run["length"] for run in some})
                losses = [mean(run["loss"] for run in some if run["length"] == context) for context in contexts]
                axes.plot(contexts, losses, color=colour, marker=marker, label=name)
                for run in (run for run in some if run["length"] == longest):
                    places = [score["last"] for score in run["positions"]]
                    right.plot(places, [score["loss"] for score in run["positions"]], color=colour, linewidth=1.5)
            axes.set(xscale="log", xlabel="context in training, tokens", ylabel="loss at the end of training")
            _name_ticks(axes, {run["length"] for run in runs})
            right.axvline(longest, color="#555555", linestyle="--", linewidth=1)
            right.set(xscale="log", xlabel=f"position, trained at {longest}", ylabel="loss on other text")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _name_ticks(axes: Any, lengths: set[int]) -> None:
    axes.set_xticks(sorted(lengths), [f"{length}" for length in sorted(lengths)], minor=False)
    axes.set_xticks([], minor=True)


def command_of(settings: Found, runs: Sequence[Found], seed: int) -> str:
    """What runs of one seed were made by."""
    module, own = "power_figures", {"beyond": settings.get("beyond"), "bins": settings.get("bins")}
    lengths = sorted({run["length"] for run in runs})
    if "window" in settings:
        module, own = "rotation_table", {"length": runs[0]["length"], "window": settings["window"]}
        lengths = settings["lengths"]
    shared = {name: settings[name] for name in ("data", "size", "steps", "batch_tokens", "learning_rate", "tokens")}
    told = {**shared, **own, "encodings": ",".join(dict.fromkeys(run["encoding"] for run in runs))}
    told |= {"lengths": ",".join(map(str, lengths)), "seed": seed}
    options = [f"--{name.replace('_', '-')} {value}" for name, value in told.items()]
    if powers := sorted({value for run in runs for key, value in run["options"] if key == "p"}):
        options.append(f"--powers {','.join(map(str, powers))}")
    return " ".join([f"python -m deadreckon.lab.{module}", *options, *(["--packed"] if settings["packed"] else [])])


def write(paths: Sequence[Path], page: Path) -> None:
    """The page and its picture."""
    settings, runs = read(paths)
    first, picture = runs[0], page.with_suffix(".png")
    rotations = "window" in settings
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    seeds = sorted({run["seed"] for run in runs})
    text = [
        f"# {'Rotations that add up' if rotations else 'Symmetric powers'} on text", "",
        f"{first['date']}: {first['device']}; {versions}. Models of size {settings['size']}, "
        f"{first['parameters'] / 1e6:.0f} million parameters; {settings['steps']} steps of {settings['batch_tokens']} "
        f"tokens, learning rate {settings['learning_rate']:g}; seeds {', '.join(map(str, seeds))}; "
        f"{settings['tokens']} tokens foretold in each evaluation.", "",
        *(f"    {command_of(settings, runs, seed)}" for seed in seeds), "",
        *(rotation_tables(runs) if rotations else power_tables(runs)),
        f"![{page.stem}]({picture.name})",
    ]  # fmt: skip
    draw(settings, runs, picture)
    page.write_text("\n".join(text) + "\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deadreckon.lab.text_pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that the commands have saved")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    chosen = parser.parse_args()
    try:
        write(chosen.results, chosen.page)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{chosen.page}, {chosen.page.with_suffix('.png')}")


if __name__ == "__main__":
    main()
