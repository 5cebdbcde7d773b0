"""Texts to train and test on, named in a recipe's options; a run's folder keeps nothing of them but the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from deadreckon.tasks.language import TOKENIZER_FILE, Corpus, Language, load_corpus, open_corpus
from deadreckon.tasks.long import make_long_tasks
from deadreckon.tasks.long.question import LongTask
from deadreckon.tasks.long.rows import Questions
from deadreckon.tasks.mixture import Mixture
from deadreckon.tasks.task import Task
from deadreckon.tasks.tokens import for_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARTS = ("train", "valid", "test")  # of text that is not in a folder of tokens; the last two are the same
_make_long_tasks = lru_cache(maxsize=4)(make_long_tasks)


def read_language(
    data: str = "",
    held_out: str = "",
    part: str = "train",
    vocabulary: int = 8192,
    packed: bool = False,
    questions: float = 0.0,
    tasks: Sequence[str] = (),
    babi: str = "",
    books: str = "",
    tokenizer: str = "",
) -> Language | Mixture:
    """Language modelling on any text, optionally with questions of the long-context suite.

    Args:
        data: training text: a file, a folder or a dataset, see `deadreckon.tasks.text.read_documents`. Or a folder of
            tokens, as `deadreckon.tasks.language.make_corpora` writes it, with all parts in it.
        held_out: held-out text.
        part: "train", "valid", "test", or any other that a folder of tokens has.
        vocabulary: size of the tokenizer, which is trained on `data`.
        packed: whether attention stays within a document.
        questions: the share of rows that are questions.
        tasks: of the questions; see :func:`deadreckon.tasks.long.make_long_tasks`.
        babi: for BABILong.
        books: likewise.
        tokenizer: folder of a tokenizer, as save_pretrained writes it, to use instead of training one.
    """
    if not isinstance(packed, bool):
        raise ValueError(f"options.packed: expected true or false, got {packed!r}")
    if type(questions) not in (int, float) or not 0 <= questions <= 1:
        raise ValueError(f"options.questions: expected a share of the rows, from 0 to 1, got {questions!r}")
    if isinstance(tasks, str):
        raise ValueError(f'options.tasks: expected names in brackets, such as ["passkey", "vt"], got {tasks!r}')
    if not data:
        raise ValueError(
            "options.data: expected a text to learn from; --change options.data=FILE options.held_out=FILE"
        )
    tokens = sorted(path.stem for path in Path(data).glob("*.npy")) if _has_tokens(data) else PARTS
    if part not in tokens:
        raise ValueError(f"part: expected one of {', '.join(tokens)}; got {part!r}")
    text = Language(_read(data, held_out, part, vocabulary, tokenizer), packed)
    if not questions:
        return text
    asked = read_long_tasks(tasks, babi, books, "train" if part == "train" else "test")
    return Mixture(text, Questions(asked, text.corpus.tokenizer), questions)


def read_long_tasks(
    tasks: Sequence[str] = (), babi: str = "", books: str = "", part: str = "test"
) -> dict[str, LongTask]:
    """Tasks of the long-context suite, from a recipe's options; data is read once."""
    return _make_long_tasks(tuple(tasks), babi=babi, books=books, part=part)


def _has_tokens(data: str) -> bool:
    return (Path(data) / TOKENIZER_FILE).exists()


@lru_cache(maxsize=4)
def _read(data: str, held_out: str, part: str, vocabulary: int, tokenizer: str) -> Corpus:
    if _has_tokens(data):
        return open_corpus(data, part)
    if not held_out:
        raise ValueError("options.held_out: expected a text to test on, got none (deadreckon convert: --held-out)")
    if tokenizer:
        return load_corpus(data if part == "train" else held_out, tokenizer=fast_tokenizer(tokenizer))
    corpus = load_corpus(data, vocabulary=vocabulary)
    return corpus if part == "train" else load_corpus(held_out, tokenizer=corpus.tokenizer)


def tokenizer_beside(folder: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in a model's folder."""
    from transformers import AutoTokenizer  # which takes seconds: `deadreckon list` needs none

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: expected a tokenizer beside the model in {str(folder)!r}, as save_pretrained writes it, got none"
        ) from error


def fast_tokenizer(folder: str) -> Tokenizer:
    """The same as a tokenizer of the `tokenizers` library."""
    tokenizer = tokenizer_beside(folder)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer: expected a fast one, with tokenizer.json, got {type(tokenizer).__name__}")
    return tokenizer.backend_tokenizer


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers split text alike."""
    one, other = (json.loads(tokenizer.to_str())["model"] for tokenizer in (one, other))
    return bool(one == other)


def text_of(task: Task) -> Language:
    """The text of a language task, with questions or without."""
    text = task.text if isinstance(task, Mixture) else task
    assert isinstance(text, Language)
    return text


def save_tokenizer(task: Task, folder: Path) -> None:
    """Saves the tokenizer of a language task beside a model, where `deadreckon generate` finds it."""
    if isinstance(task, Mixture | Language):
        for_transformers(text_of(task).corpus.tokenizer).save_pretrained(folder)
