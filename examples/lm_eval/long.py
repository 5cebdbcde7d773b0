"""Functions of the lm-evaluation-harness tasks in this folder: long-context questions as documents, and scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from deadreckon.tasks.long import make_long_tasks
from deadreckon.tasks.long.question import LongTask, Question, fit

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)  # that there are metrics for, in _long_yaml
NOT_ASKED = -1.0


@lru_cache
def make_task(name: str, babi: str = "", books: str = "") -> LongTask:
    """One task of the long-context suite; data is read once."""
    return make_long_tasks([name], babi=babi, books=books)[name]


def load(
    name: str,
    pretrained: str = "",
    tokenizer: str = "",
    lengths: Sequence[int] = (4096,),
    rows: int = 100,
    seed: int = 0,
    babi: str = "",
    books: str = "",
    **others: Any,
) -> dict[str, Any]:
    """The test split: questions of a task, fitted to lengths in the tokens of a tokenizer."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    if not (tokenizer or pretrained):
        raise ValueError('metadata: expected a tokenizer, such as --metadata \'{"pretrained": "MODEL"}\', got none')
    if strange := [length for length in lengths if length not in LENGTHS]:
        raise ValueError(f"lengths: expected some of {', '.join(map(str, LENGTHS))}; got {strange[0]}")
    encode = AutoTokenizer.from_pretrained(tokenizer or pretrained)
    task = make_task(name, babi, books)
    documents = []
    for length in lengths:
        near: int | None = None
        for number in range(rows):
            fitted = fit(task, number, length, lambda text: len(encode(text, verbose=False).input_ids), seed, near)
            near, one = fitted.size, fitted.question
            shared = {"name": name, "babi": babi, "books": books, "length": length}
            asked = {"prompt": one.prompt, "answer": one.answer, "references": list(one.references), "asked": one.asked}
            documents.append(shared | asked)
    return {"test": Dataset.from_list(documents)}


def process_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The score of a generated answer, under the name of its length."""
    task = make_task(document["name"], document["babi"], document["books"])
    question = Question(document["prompt"], document["answer"], tuple(document["references"]), document["asked"])
    scores = {str(length): NOT_ASKED for length in LENGTHS}
    return scores | {str(document["length"]): task.score(question, results[0])}


def mean(scores: list[float]) -> float:
    """The mean over all questions."""
    asked = [score for score in scores if score != NOT_ASKED]
    return sum(asked) / len(asked) if asked else NOT_ASKED
