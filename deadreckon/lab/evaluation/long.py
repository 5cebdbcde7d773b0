"""Long-context tasks, answered by generation: fitted prompts, batches, and a file of answers to resume from.

Works with any causal language model of transformers and its tokenizer. A prompt and its answer fit a length together,
in tokens of that tokenizer. Memory is not quadratic in the length: models other than ours prefill in chunks, through
the KV cache, since with padding they would hold a mask of all pairs of tokens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

import deadreckon as dr
from deadreckon.lab.evaluation.scores import autocast, isolated_rng
from deadreckon.lab.files import add_lines, format_line, read_lines, write_text
from deadreckon.tasks.long.question import Fitted, LongTask, check_room, fit

BATCH_TOKENS = 1 << 16  # of prompts that are read at a time, one at least
WORKERS = 8  # threads that fit prompts
PIECE = 2048  # tokens of a prompt that other models read at once
Key = tuple[str, int, int]  # a task, a length, and the number of a question


@dataclass(frozen=True)
class Answer:
    """A model's answer to one question."""

    task: str
    length: int  # asked for
    number: int
    tokens: int  # of the prompt
    depth: float | None  # of what is asked for, where that is known
    references: list[str]
    said: str
    score: float  # from 0 to 1

    @property
    def key(self) -> Key:
        return self.task, self.length, self.number


class Answers:
    """Answers of a model in a JSON lines file, from which a killed run resumes.

    Args:
        path: of the file; its answers are kept, except a line that was cut off.
        about: the model and whatever determines the questions, as JSON values; the first line of the file. Values that
            are empty or None, here or in the file, match anything.

    Raises:
        ValueError: if the file has answers of another model, or to other questions.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        before, *answers = read_lines(path) or [about]
        before = before if answers else about
        said, now = ({name: x for name, x in one.items() if x not in (None, [])} for one in (before, about))
        if differing := [name for name in said.keys() & now.keys() if said[name] != now[name]]:
            name = differing[0]
            raise ValueError(
                f"out: expected a folder without answers, or with answers to {name} {now[name]!r}, "
                f"got {path} with {said[name]!r}"
            )
        self.known = {answer.key: answer for answer in (Answer(**one) for one in answers)}
        write_text(path, "".join(map(format_line, [said | now, *answers])))

    def add(self, answers: Iterable[Answer]) -> None:
        """Appends answers; they are on disk when this returns."""
        new = {answer.key: answer for answer in answers}
        add_lines(self.path, map(asdict, new.values()))
        self.known |= new


def read_answers(path: Path, about: Mapping[str, Any]) -> list[Answer]:
    """Reads the answers of any model, after checking that they are to the questions of `about`; see `Answers`."""
    if not path.exists():
        raise ValueError(f"beside: expected answers of `deadreckon eval --suite long`, got no {path}")
    said, *answers = read_lines(path) or [{}]
    for name, now in about.items():
        if said.get(name) not in (None, [], now) and now not in (None, []):
            raise ValueError(f"beside: expected answers to {name} {now!r}, got {path} with {said[name]!r}")
    return [Answer(**line) for line in answers]


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, LongTask],
    lengths: Sequence[int],
    rows: int,
    *,
    known: Collection[Key] = (),
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[list[Answer]]:
    """Yields answers to the first `rows` questions of each task at each length, except known ones, batch by batch.

    Args:
        seed: of the questions.
        batch_tokens: about how many prompt tokens make a batch.
    """
    jobs = [
        (name, length, numbers)
        for length in lengths
        for name in tasks
        for numbers in _batches([n for n in range(rows) if (name, length, n) not in known], batch_tokens // length)
    ]
    sizes = dict[tuple[str, int], int]()
    tokenizer("a")  # settles its options, which threads then only read

    def count(text: str) -> int:
        return len(tokenizer(text, return_attention_mask=False, verbose=False).input_ids)

    for length in sorted({length for _, length, _ in jobs}):  # some tasks need more where there is more room
        check_room({name: tasks[name] for name, at, _ in jobs if at == length}, length, count)

    def fitted(name: str, length: int, number: int) -> Fitted:
        one = fit(tasks[name], number, length, count, seed, sizes.get((name, length)))
        sizes[name, length] = one.size
        return one

    # Fits the next prompts while the model generates: tokenizers run in threads of their own.
    pool = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1))
    ahead: deque[tuple[str, int, list[int], list[Future[Fitted]]]] = deque()
    try:
        for place in range(len(jobs) + 1):
            if place < len(jobs):
                name, length, numbers = jobs[place]
                ahead.append((name, length, numbers, [pool.submit(fitted, name, length, n) for n in numbers]))
            if place > 0:
                name, length, numbers, futures = ahead.popleft()
                asked, task = [future.result() for future in futures], tasks[name]
                questions = [one.question for one in asked]
                said = generate(model, tokenizer, [question.prompt for question in questions], task.new_tokens, seed)
                yield [
                    Answer(name, length, number, one.tokens, question.depth, list(question.references), words,
                           task.score(question, words))
                    for number, one, question, words in zip(numbers, asked, questions, said, strict=True)
                ]  # fmt: skip
    finally:  # what threads have not begun is dropped, however this ends
        pool.shutdown(cancel_futures=True)


def _batches(numbers: list[int], size: int) -> Iterator[list[int]]:
    size = max(1, size)
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], new_tokens: int, seed: int = 0
) -> list[str]:
    """Greedy continuations of a batch of prompts, up to an end token or `new_tokens`."""
    device = model.device
    rows = [tokenizer(prompt, verbose=False).input_ids for prompt in prompts]
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    stops = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    pad = next((one for one in (tokenizer.pad_token_id, *stops) if one is not None), 0)
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    linear = isinstance(model, dr.DeadReckonForCausalLM)  # its memory is, whatever the padding
    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, pad_token_id=pad, eos_token_id=list(stops) or None,
        prefill_chunk_size=None if linear or width <= PIECE else PIECE,
    )  # fmt: skip
    model.eval()
    with isolated_rng(device, seed), autocast(device, model.dtype == torch.float32):
        try:
            said = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        except IndexError as error:  # of a table of positions
            known = getattr(model.config, "max_position_embeddings", "its")
            raise ValueError(
                f"lengths: expected at most {known} positions, as {model.config.model_type} has, "
                f"got {width} tokens and {new_tokens} new ones"
            ) from error
    answers = [list(takewhile(lambda token: token not in stops, row)) for row in said]
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
