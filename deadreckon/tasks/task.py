"""The interface of tasks, and what they share: lengths, numbers, one vocabulary, rows of question and answer.

A row is scored where it has labels; elsewhere they are NOT_SCORED. `labels[:, t]` is the target at position t given the
preceding tokens. In most tasks it is the token at that position, and then a row counts as correct if every scored token
is the argmax *given the correct tokens before it* (teacher forcing): greedy decoding from the end of the question makes
its first error at the same token, so both accept the same rows, end token included.

Rows differ in length and are padded on the right, which a causal model does not see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NOT_SCORED = -100  # ignored by Hugging Face's loss
HOLE = -1  # no token: removed by `compact`
ENDLESS = sys.maxsize

# One vocabulary for all tasks of questions and answers. A digit's token is the digit.
ALPHABET = (
    *"0123456789", "_", "=", ".", "+", ",", "→", "x", "[", "]", "*", "(", ")", ":",
    "walk", "look", "run", "jump", "turn", "left", "right", "opposite", "around", "twice", "thrice", "and", "after",
    "I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT",
)  # fmt: skip
TOKEN = {word: token for token, word in enumerate(ALPHABET)}
PAD, EQUALS, END = TOKEN["_"], TOKEN["="], TOKEN["."]
VOCAB_SIZE = 64  # as in the paper, for every task; ALPHABET is smaller


class Task(Protocol):
    """The interface for training and scoring.

    A task whose documents are to be packed also has `document_end`, the token at the end of each: see `draw`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def lengths(self) -> Sequence[int]:
        """The possible lengths, in the task's own unit: digits, actions, tokens."""

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows of one length, or of lengths drawn from a range: uniform over possible lengths, or, if the examples are
        a fixed set, over examples.

        Returns:
            tokens (count, width), padded on the right to the longest row, and labels of the same shape.
        """

    def spell(self, tokens: Tensor) -> str:
        """One row as readable text, without padding."""


class Batch(NamedTuple):
    """A batch for training: `model(tokens, labels=labels, cu_seqlens=cu_seqlens)`."""

    tokens: Tensor  # (rows, width)
    labels: Tensor
    cu_seqlens: Tensor | None = None  # (documents + 1,), if packed: documents of one row that do not see each other

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device; to a GPU asynchronously, from pinned memory."""
        pinned = torch.device(device).type == "cuda"
        moved = (x if x is None else (x.pin_memory() if pinned else x).to(device, non_blocking=pinned) for x in self)
        return Batch(*moved)  # type: ignore[arg-type]


def draw(task: Task, count: int, length: int | range, generator: torch.Generator, parts: int = 1) -> list[Batch]:
    """Draws `count` sequences, split into so many equal batches (gradient accumulation); packed if the task is."""
    tokens, labels = task.sample(count, length, generator)
    end = getattr(task, "document_end", None)
    pairs = zip(tokens.chunk(parts), labels.chunk(parts), strict=True)
    return [Batch(*pair) if end is None else pack(*pair, end) for pair in pairs]


def pack(tokens: Tensor, labels: Tensor, end: int) -> Batch:
    """Packs rows (count, width) into one (1, count · width); a document starts with every row and after every `end`.

    The first token of a document is not scored: it has no context.
    """
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end
    cu_seqlens = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([tokens.numel()])])
    labels = torch.where(begins, NOT_SCORED, labels)
    return Batch(tokens.reshape(1, -1), labels.reshape(1, -1), cu_seqlens.to(torch.int32))


def draw_lengths(
    count: int, length: int | range, offered: Sequence[int], generator: torch.Generator, weights: Tensor | None = None
) -> Tensor:
    """The length of each row (count,): `length` itself, or drawn from those in both the range and `offered`.

    Args:
        weights: relative frequency of each possible length, (longest + 1,); uniform by default.
    """
    if count < 1:
        raise ValueError(f"count: expected 1 or more, got {count}")
    if isinstance(length, int):
        if length not in offered:
            raise ValueError(f"length: expected {_spell_lengths(offered)}, got {length}")
        return torch.full((count,), length)
    candidates = torch.tensor([n for n in length if n in offered])
    if not len(candidates):
        raise ValueError(f"length: expected a range with {_spell_lengths(offered)} in it, got {length}")
    chances = torch.ones(len(candidates)) if weights is None else weights[candidates].float()
    return candidates[torch.multinomial(chances, count, replacement=True, generator=generator)]


def _spell_lengths(offered: Sequence[int]) -> str:
    if isinstance(offered, range) and offered.stop == ENDLESS:
        return f"{offered.start} or more" + (f" in steps of {offered.step}" if offered.step > 1 else "")
    if isinstance(offered, range) and offered.step == 1:
        return f"{offered.start} to {offered.stop - 1}"
    return "one of " + ", ".join(map(str, offered))


def draw_digits(lengths: Tensor, generator: torch.Generator, *, base: int = 10) -> Tensor:
    """Rows of digits of the given lengths (count, longest), uniform, leading zeros allowed; holes after a row's end."""
    width = int(lengths.max())
    digits = torch.randint(0, base, (len(lengths), width), generator=generator)
    return torch.where(torch.arange(width) < lengths[:, None], digits, HOLE)


def draw_operands(lengths: Tensor, equal: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two numbers per row, digits (count, longest), least significant first, holes after the most significant.

    One of them, at random, has `lengths` digits; the other 1 to as many, uniformly, or as many if `equal`.
    A number of more than one digit has no leading zero.
    """
    others = lengths
    if not equal:
        others = 1 + (torch.rand(len(lengths), generator=generator) * lengths).long()
    swap = torch.randint(0, 2, (len(lengths),), generator=generator) == 1
    sizes = torch.where(swap, others, lengths), torch.where(swap, lengths, others)
    return _draw_number(sizes[0], generator), _draw_number(sizes[1], generator)


def _draw_number(lengths: Tensor, generator: torch.Generator) -> Tensor:
    digits = draw_digits(lengths, generator)
    leading = torch.randint(1, 10, (len(lengths), 1), generator=generator)
    last = lengths[:, None] - 1
    return digits.scatter(1, last, torch.where(last > 0, leading, digits[:, :1]))


def compact(tokens: Tensor, fill: int = PAD) -> Tensor:
    """Removes holes from rows, and pads on the right: (count, width) to (count, longest)."""
    kept = tokens != HOLE
    longest = int(kept.sum(1).max())
    places = torch.where(kept, kept.cumsum(1) - 1, longest)  # holes go to an extra column, which is cut off
    rows = tokens.new_full((len(tokens), longest + 1), fill)
    return rows.scatter_(1, places, tokens)[:, :longest]


def complete(question: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens ``question = answer .`` and their labels: the answer and the end token. Both may have holes."""
    question_tokens = (question != HOLE).sum(1, keepdim=True) + 1
    tokens = compact(torch.cat([question, column(question, EQUALS), answer, column(question, END)], dim=1))
    scored = (torch.arange(tokens.shape[1]) >= question_tokens) & (tokens != PAD)
    return tokens, torch.where(scored, tokens, NOT_SCORED)


def column(like: Tensor, token: int) -> Tensor:
    """The same token for each row (count, 1)."""
    return like.new_full((len(like), 1), token)


def encode(text: str, name: str = "text") -> Tensor:
    """Tokens (1, length) of a text over ALPHABET: words, or single characters; blanks only separate them."""
    words = re.findall(r"[A-Za-z_]+|\S", text)
    if strange := [word for word in words if word not in TOKEN]:
        raise ValueError(f"{name}: expected words of the alphabet, got {strange[0]!r} in {text!r}")
    return torch.tensor([[TOKEN[word] for word in words]])


def spell(tokens: Tensor) -> str:
    """The text of one row (length,) over ALPHABET: characters side by side, words with blanks around them."""
    words = [ALPHABET[token] for token in tokens.tolist() if token != PAD]
    apart = [len(left) > 1 or len(right) > 1 for left, right in pairwise(words)]
    return "".join(word + " " * space for word, space in zip(words, [*apart, False], strict=False))
