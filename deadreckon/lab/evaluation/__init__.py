"""Evaluation: evaluators by name, scores, perplexity by context length, generation."""

from __future__ import annotations

from deadreckon.lab.evaluation.evaluators import EVALUATORS, evaluate, places_to_test
from deadreckon.lab.evaluation.scores import (
    Place,
    Score,
    Tally,
    autocast,
    format_value,
    is_better,
    is_wrong,
    mean_of_best,
    score,
    tally,
)

__all__ = [
    "EVALUATORS",
    "Place",
    "Score",
    "Tally",
    "autocast",
    "evaluate",
    "format_value",
    "is_better",
    "is_wrong",
    "mean_of_best",
    "places_to_test",
    "score",
    "tally",
]
