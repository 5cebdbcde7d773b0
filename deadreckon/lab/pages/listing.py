"""`deadreckon list`: experiments, encodings and implementations."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from rich.console import Console

import deadreckon as dr
from deadreckon.lab.pages.tables import terminal
from deadreckon.lab.recipes import EXPERIMENTS


def print_listing() -> None:
    """Prints them as tables."""
    sources = [experiment.source for experiment in EXPERIMENTS.values()]
    recipes = [
        (name, one.about, "likewise" if one.source == before else one.source)
        for (name, one), before in zip(EXPERIMENTS.items(), ["", *sources], strict=False)
    ]
    encodings = [(name, *_describe(name, kind)) for name, kind in dr.ENCODINGS.items()]
    picks = 'Implementations; "auto" picks triton on CUDA where it serves, else blockwise'
    console = Console()
    console.print(terminal(("name", "what is learnt", "from"), recipes, 3, "Recipes"))
    console.print(terminal(("name", "what it does", "options"), encodings, 3, "Encodings"))
    console.print(terminal(("impl", "what it is"), dr.IMPLEMENTATIONS.items(), 2, picks))


def _describe(name: str, kind: Any) -> tuple[str, str]:
    """Description and options of an encoding."""
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.name != "sizes"]
    options = ", ".join(f"{p.name}={p.default}" for p in parameters)
    if name.endswith("-values") and getattr(kind, "values", False):
        return f"{name.removesuffix('-values')}, values turning too.", options
    module = inspect.getdoc(sys.modules[kind.__module__]) or ""
    return module.split("\n\n")[0].replace("\n", " "), options
