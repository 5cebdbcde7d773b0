"""SCAN with a chain of thought: translate commands to action sequences, split by the number of actions.

    walk around left thrice and look opposite right = walk around left + walk around left + walk around left
    and look opposite right → walk around left : I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT
    I_WALK walk around left : I_TURN_LEFT … look opposite right : I_TURN_RIGHT I_TURN_RIGHT I_LOOK .

SCAN (Lake and Baroni 2018) is the language of this grammar, 20 910 commands in all:

    C → S | S and S | S after S        S → V | V twice | V thrice
    V → U | D | D′ opposite way | D′ around way        D → U way | turn way        D′ → U | turn
    U → walk | look | run | jump        way → left | right

Its length split trains on commands of up to 22 actions (16 990) and tests on those of 24 to 48 (3 920); none has 23.

First repetitions are written out, then each clause with its actions. Only tokens after = are scored, including the end
token. The length is the number of actions. (The PRISM paper, table 4, whose example this is; it tests on the whole test
set. It shows no command with "after": here, the first part keeps the command's order and its word, the second lists
clauses in order of execution, so that the actions, read from left to right, are always SCAN's own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from deadreckon.tasks import task

LONGEST_TRAINED = 22
TIMES = {"twice": 2, "thrice": 3}
PRIMITIVES = ("walk", "look", "run", "jump")


@dataclass(frozen=True)
class Scan:
    """One side of the length split.

    Args:
        split: "train" or "test".
    """

    split: str = "train"
    vocab_size: int = task.VOCAB_SIZE

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise ValueError(f"split: expected 'train' or 'test', got {self.split!r}")

    @property
    def lengths(self) -> Sequence[int]:
        """The numbers of actions that occur."""
        return _corpus(self.split)[2]

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Commands with so many actions, or a range of them, drawn uniformly over commands, and their labels."""
        tokens, actions, lengths = _corpus(self.split)
        drawn = task.draw_lengths(count, length, lengths, generator, actions.bincount())
        # Commands are sorted by their number of actions, so those of one number are contiguous.
        first, beyond = torch.searchsorted(actions, drawn), torch.searchsorted(actions, drawn, right=True)
        chosen = first + (torch.rand(count, generator=generator) * (beyond - first)).long()
        return _label(tokens[chosen])

    def everything(self) -> tuple[Tensor, Tensor]:
        """All commands, those with fewer actions first, and their labels."""
        return _label(_corpus(self.split)[0])

    def spell(self, tokens: Tensor) -> str:
        """One row as text."""
        return task.spell(tokens)


@cache
def length_split() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs of a command and its actions, for training and for testing, in SCAN's own words."""
    pairs = [(command, " ".join(act(command))) for command in commands()]
    short = [pair for pair in pairs if len(pair[1].split()) <= LONGEST_TRAINED]
    long = [pair for pair in pairs if len(pair[1].split()) > LONGEST_TRAINED]
    return short, long


def commands() -> list[str]:
    """All commands of the grammar."""
    ways, movable = ("left", "right"), (*PRIMITIVES, "turn")
    clauses = [*PRIMITIVES]
    clauses += [" ".join(words) for words in product(movable, ways)]
    clauses += [" ".join(words) for words in product(movable, ("opposite", "around"), ways)]
    sentences = clauses + [" ".join(words) for words in product(clauses, TIMES)]
    return sentences + [" ".join(words) for words in product(sentences, ("and", "after"), sentences)]


def act(command: str) -> list[str]:
    """The actions of a command."""
    return [action for clause in in_order(command) for action in act_clause(clause)]


def in_order(command: str) -> list[str]:
    """The clauses of a command in order of execution, with repetitions."""
    if " after " in command:
        later, earlier = command.split(" after ")
        return repeat(earlier) + repeat(later)
    return [clause for sentence in command.split(" and ") for clause in repeat(sentence)]


def repeat(sentence: str) -> list[str]:
    """The clause of a sentence, repeated as "twice" or "thrice" says."""
    *words, last = sentence.split()
    return [" ".join(words)] * TIMES[last] if last in TIMES else [sentence]


def act_clause(clause: str) -> list[str]:
    """The actions of a clause: a verb, optionally with a direction, opposite or around."""
    verb, *how = clause.split()
    move = [] if verb == "turn" else [f"I_{verb.upper()}"]
    if not how:
        return move
    turn = [f"I_TURN_{how[-1].upper()}"]
    return {"around": 4 * (turn + move), "opposite": 2 * turn + move}.get(how[0], turn + move)


def answer(command: str) -> str:
    """The answer to a command, without the end token."""
    words = command.split()
    joint = next((word for word in words if word in ("and", "after")), None)
    sentences = command.split(f" {joint} ") if joint else [command]
    spelled_out = f" {joint} ".join(" + ".join(repeat(sentence)) for sentence in sentences)
    clauses = (f"{clause} : {' '.join(act_clause(clause))}" for clause in in_order(command))
    return f"{spelled_out} → {' '.join(clauses)}"


@cache
def _corpus(split: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """A split's tokens (commands, longest), sorted by number of actions; these numbers; and which of them occur."""
    pairs = sorted(length_split()[split == "test"], key=lambda pair: pair[1].count("I_"))
    rows = [f"{command} = {answer(command)} .".split() for command, _ in pairs]
    tokens = torch.full((len(rows), max(map(len, rows))), task.PAD, dtype=torch.int16)
    for row, words in zip(tokens, rows, strict=True):
        row[: len(words)] = torch.tensor([task.TOKEN[word] for word in words], dtype=torch.int16)
    actions = torch.tensor([actions.count("I_") for _, actions in pairs])
    return tokens, actions, tuple(actions.unique().tolist())


def _label(rows: Tensor) -> tuple[Tensor, Tensor]:
    there = rows != task.PAD
    tokens = rows[:, : int(there.sum(1).max())].long()
    said = (tokens == task.EQUALS).cumsum(1) > (tokens == task.EQUALS)  # right of =
    return tokens, torch.where(said & (tokens != task.PAD), tokens, task.NOT_SCORED)
