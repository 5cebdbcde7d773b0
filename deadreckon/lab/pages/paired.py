"""Paired differences: losses of two models on the same tokens, text by text.

Texts differ in how hard they are by far more than models do, so the standard error of a difference is taken between
texts: rows of the greatest test length, of as many documents as are that long. It tells what other text would change,
not what another seed would; that is in the tables of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

from deadreckon.lab.pages.comparison import Comparison
from deadreckon.lab.recipes import title_of

BASELINE = "rope"


def paired_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of one's losses less the other's, and its standard error between texts.

    Args:
        one: losses (seeds, texts) of a model; of several seeds, the mean is compared.
        other: likewise, on the same texts.
    """
    pairs = zip(*(map(mean, zip(*seeds, strict=True)) for seeds in (one, other)), strict=True)
    differences = [left - right for left, right in pairs]
    return mean(differences), stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else float("nan")


def paired_table(comparison: Comparison, condition: str) -> tuple[str, list[str], list[list[str]]] | None:
    """What a table of differences shows, its headings and rows by length; None if there is nothing to pair."""
    tested = [label for label, places in comparison.texts.items() if any(name == condition for name, _ in places)]
    if len(tested) < 2:
        return None
    baseline = BASELINE if BASELINE in tested else tested[0]
    others = [label for label in tested if label != baseline]
    rows, count = [], 0
    for length in comparison.lengths(condition):
        row, reference = [f"{length}"], comparison.texts[baseline].get((condition, length))
        for label in others:
            texts = comparison.texts[label].get((condition, length))
            if texts is None or reference is None or len(texts[0]) != len(reference[0]):
                row.append("")
                continue
            count = len(texts[0])
            row.append("{:+.4f} ± {:.4f}".format(*paired_difference(texts, reference)))
        rows.append(row)
    about = (
        f"Loss less that of {title_of(baseline)} on the same tokens, {condition}, nats ± standard error between "
        f"{count} texts"
    )
    return about, [comparison.test(condition).axis, *map(title_of, others)], rows
