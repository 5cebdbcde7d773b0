"""`deadreckon list`: experiments, encodings and implementations."""

from __future__ import annotations

import inspect
import sys

from rich.console import Console
from rich.table import Table

import deadreckon as dr
from deadreckon.lab.recipes import EXPERIMENTS


def print_listing() -> None:
    """Prints them as tables."""
    console = Console()
    recipes = Table(title="Recipes", title_justify="left")
    recipes.add_column("name", no_wrap=True)
    recipes.add_column("what is learnt")
    recipes.add_column("from")
    before = ""
    for name, experiment in EXPERIMENTS.items():
        recipes.add_row(name, experiment.about, "likewise" if experiment.source == before else experiment.source)
        before = experiment.source
    console.print(recipes)
    encodings = Table(title="Encodings", title_justify="left")
    encodings.add_column("name", no_wrap=True)
    encodings.add_column("what it does")
    encodings.add_column("options")
    for name, kind in dr.ENCODINGS.items():
        module = inspect.getdoc(sys.modules[kind.__module__]) or ""
        parameters = [p for p in inspect.signature(kind).parameters.values() if p.name != "sizes"]
        options = ", ".join(f"{p.name}={p.default}" for p in parameters)
        summary = module.split("\n\n")[0].replace("\n", " ")
        if name.endswith("-values") and getattr(kind, "values", False):
            summary = f"{name.removesuffix('-values')}, values turning too."
        encodings.add_row(name, summary, options)
    console.print(encodings)
    implementations = Table(
        title='Implementations; "auto" picks triton on CUDA where it serves, else blockwise', title_justify="left"
    )
    implementations.add_column("impl", no_wrap=True)
    implementations.add_column("what it is")
    for name, what in dr.IMPLEMENTATIONS.items():
        implementations.add_row(name, what)
    console.print(implementations)
