"""Evaluation: evaluators by name, scores, perplexity by context length, generation."""

from deadreckon.lab.evaluation.evaluators import evaluate, places_to_test
from deadreckon.lab.evaluation.scores import (
    GROWING,
    SHARES,
    Place,
    Score,
    autocast,
    format_value,
    is_better,
    is_wrong,
    score,
)
