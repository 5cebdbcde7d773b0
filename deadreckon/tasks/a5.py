"""The word problem of A5, the even permutations of five elements: the smallest group that is not solvable, so that
tracking a product in it is NC¹-complete, and impossible for transformers of fixed depth unless TC⁰ = NC¹.

Two forms. `A5Products`: tokens are the group's 60 elements, and the target at each position is the product of all so
far. It counts as solved where more than 90% of rows are entirely correct; trained and tested at lengths 2 to 20, with
rows in an 80/20 split. (Merrill, Petty and Sabharwal 2024.) Permutations are written as images of 12345:

    tokens    21354 31245 31245
    targets   21354 13254 32154

Labels are not the tokens at their positions: the target after reading position t is the label of position t + 1, so
rows have one more token at the end, for the last target.

`A5Identity`: words over g1 = (1 2 3), g2 = (1 2 4), g3 = (1 2 5) and their inverses: is the product the identity? One
token is scored. (Yang et al. 2025.) That is one bit of supervision per word; so training may have further targets after
each letter: whether the product so far is the identity, or which element it is.

    _ g1 g2 g1' g2' = no

Rows of both start with a token without meaning, as those of the first form's authors do: a common start of all routes.
(PaTH with two layers needs it: after 4000 steps it knows all products of four elements, and 6% without.)
The second form suits routes of one reflection per token: g = (1 2 x) is (1 2)(1 x) and its inverse (1 x)(1 2), so that
a word is a product of (1 x) and (2 x), which of them follows from the token and the parity of its position, and a last
(1 2) if the word's length is odd. Other elements of A5 are two reflections each.

Of random words, 1 in 6 is the identity at length 2, 1 in 52 at length 10 and 1 in 60 from length 20 on, so that "no" is
right for 98.3% of them. Rows here are therefore half and half, each half uniform over all words of its kind; chance is
50%. Products are taken from left to right: ab is first a, then b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from deadreckon.tasks import task

ORDER = 60
IDENTITY = 0  # its element: the first
GENERATORS = ("23145", "24315", "25341", "31245", "41325", "51342")  # (1 2 3), (1 2 4), (1 2 5), then their inverses
WORDS = ("g1", "g2", "g3", "g1'", "g2'", "g3'", "=", "yes", "no", "_")
EQUALS, YES, NO, PAD = range(6, 10)  # PAD is also the first token of a row
TRIES = 8  # candidates drawn at once to replace a row of the wrong split
PRIME, MULTIPLIER, ADDEND = 2**31 - 1, 1_103_515_245, 12_345  # of the hash that splits rows


@cache
def elements() -> tuple[str, ...]:
    """The even permutations as images of 12345, in lexicographic order; the identity is the first."""
    even = []
    for images in permutations("12345"):
        inversions = sum(images[i] > images[j] for j in range(5) for i in range(j))
        if inversions % 2 == 0:
            even.append("".join(images))
    return tuple(even)


@cache
def product_table() -> Tensor:
    """Products of elements (60, 60): the row's element first, then the column's."""
    number = {element: i for i, element in enumerate(elements())}
    rows = [[number["".join(b[int(x) - 1] for x in a)] for b in elements()] for a in elements()]
    return torch.tensor(rows)


def products(factors: Tensor) -> Tensor:
    """Prefix products: the product of all elements up to each position (count, length)."""
    table, so_far = product_table(), [factors[:, 0]]
    for factor in factors[:, 1:].unbind(1):
        so_far.append(table[so_far[-1], factor])
    return torch.stack(so_far, dim=1)


@dataclass(frozen=True)
class A5Products:
    """The product so far, at every position.

    Args:
        part: "train", "test", or "all" rows. A hash of the row decides its split: a fifth is for testing.
    """

    part: str = "all"
    vocab_size: int = ORDER + 1  # 60 is the first token, the end token and the padding
    lengths: Sequence[int] = range(2, task.ENDLESS)

    def __post_init__(self) -> None:
        if self.part not in ("train", "test", "all"):
            raise ValueError(f"part: expected 'train', 'test' or 'all', got {self.part!r}")

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows, two tokens longer than their length, and the products, each one position after its last factor."""
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        there = torch.arange(int(lengths.max())) < lengths[:, None]
        factors = torch.where(there, torch.randint(0, ORDER, there.shape, generator=generator), IDENTITY)
        while self.part != "all":
            wrong = is_for_testing(torch.where(there, factors, ORDER)) != (self.part == "test")
            if not wrong.any():
                break
            # Several candidates at once: for most rows one of them is in the wanted split.
            within = there[wrong][:, None]
            tries = torch.randint(0, ORDER, (len(within), TRIES, there.shape[1]), generator=generator)
            right = is_for_testing(torch.where(within, tries, ORDER).flatten(0, 1)) == (self.part == "test")
            first = right.view(-1, TRIES).int().argmax(1)
            factors[wrong] = torch.where(within[:, 0], tries[torch.arange(len(tries)), first], IDENTITY)
        labels = torch.where(there, products(factors), task.NOT_SCORED)
        tokens = torch.where(there, factors, ORDER)
        edge, silent = task.column(tokens, ORDER), task.column(labels, task.NOT_SCORED)
        return torch.cat([edge, tokens, edge], dim=1), torch.cat([silent, silent, labels], dim=1)

    def spell(self, tokens: Tensor) -> str:
        """One row as permutations."""
        return " ".join(elements()[token] for token in tokens.tolist() if token < ORDER)


def is_for_testing(rows: Tensor) -> Tensor:
    """Whether a row (count, longest), padded with 60, is in the fifth that is held out for testing, by its hash.

    The hash of a row of n is the sum of MULTIPLIER^(n − 1 − i) · (row[i] + ADDEND), modulo PRIME.
    """
    there = rows < ORDER
    behind = there.sum(1, keepdim=True) - 1 - torch.arange(rows.shape[1])
    factors = powers(rows.shape[1])[behind.clamp(min=0)]
    code = torch.where(there, factors * (rows + ADDEND) % PRIME, 0).sum(1) % PRIME
    return (code * 48_271 % PRIME) % 5 == 0


@cache
def powers(count: int) -> Tensor:
    """The hash's factors (count,), that of the last element first."""
    factors = [1]
    for _ in range(count - 1):
        factors.append(factors[-1] * MULTIPLIER % PRIME)
    return torch.tensor(factors)


@dataclass(frozen=True)
class A5Identity:
    """Is a word's product the identity?

    Args:
        identity: share of rows where it is; None for random words.
        asked: targets besides the answer: "end" for none; "prefixes" for an answer after each letter; "products" for
            the product so far, after each letter.
    """

    identity: float | None = 0.5
    asked: str = "end"
    vocab_size: int = len(WORDS)  # and 60 more for products
    lengths: Sequence[int] = range(2, task.ENDLESS)  # no word of one letter is the identity

    def __post_init__(self) -> None:
        if self.identity is not None and not 0 <= self.identity <= 1:
            raise ValueError(f"identity: expected a share or None, got {self.identity!r}")
        if self.asked not in ("end", "prefixes", "products"):
            raise ValueError(f"asked: expected 'end', 'prefixes' or 'products', got {self.asked!r}")
        if self.asked == "products":
            object.__setattr__(self, "vocab_size", len(WORDS) + ORDER)

    def sample(self, count: int, length: int | range, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The first token, a word, then = and the answer, which is scored.

        Further targets after a letter are labels of the next position, whatever token is there.
        """
        lengths = task.draw_lengths(count, length, self.lengths, generator)
        others, anywhere = range(IDENTITY + 1, ORDER), range(ORDER)
        ends = (anywhere, anywhere) if self.identity is None else (others, range(IDENTITY, IDENTITY + 1))
        kinds = (torch.rand(count, generator=generator) < (self.identity or 0.0)).long()
        words, so_far = draw_words(lengths, ends, kinds, generator)
        answers = torch.where(so_far == IDENTITY, YES, NO)
        said = answers.gather(1, lengths[:, None] - 1)
        edge, equals = task.column(words, PAD), task.column(words, EQUALS)
        tokens = torch.cat([edge, task.compact(torch.cat([words, equals, said], dim=1), fill=PAD)], dim=1)
        labels = torch.where((tokens == YES) | (tokens == NO), tokens, task.NOT_SCORED)
        if self.asked != "end":
            asked = answers if self.asked == "prefixes" else so_far + len(WORDS)
            labels[:, 2:-1] = torch.where(words == task.HOLE, labels[:, 2:-1], asked)
        return tokens, labels

    def spell(self, tokens: Tensor) -> str:
        """One row as words."""
        return " ".join(WORDS[token] for token in tokens.tolist() if token != PAD)


@cache
def steps() -> Tensor:
    """Where each generator leads from each element (60, 6)."""
    return product_table()[:, [elements().index(generator) for generator in GENERATORS]]


@cache
def letter_shares(ends: tuple[range, ...], longest: int) -> Tensor:
    """Cumulative probabilities of the next letter, (kinds · letters to come · 60, 6), for words with allowed ends.

    The probability that random letters lead from an element to an allowed end is known for any number of letters to
    come; a letter is drawn in proportion to that probability after it.
    """
    kinds = torch.tensor([[element in end for element in range(ORDER)] for end in ends], dtype=torch.float64)
    chances = [kinds]
    for _ in range(longest - 1):
        chances.append(chances[-1][:, steps()].mean(2))
    to_come = torch.stack(chances, dim=1)  # (kinds, letters to come, 60)
    sums = to_come[:, :, steps()].cumsum(3)
    return (sums / sums[..., -1:]).flatten(0, 2)


def draw_words(
    lengths: Tensor, ends: tuple[range, ...], kinds: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Words over the generators (count, longest), uniform over those whose product is an allowed end.

    Args:
        lengths: of the words, (count,).
        ends: for each kind of word, the elements that its product may be.
        kinds: of the words, (count,).

    Returns:
        the words, with holes after their ends, and the product of all letters up to each position.
    """
    longest = int(lengths.max())
    shares = letter_shares(ends, longest)
    left = lengths - torch.arange(1, longest + 1)[:, None]  # letters to come (longest, count)
    starts = (kinds * longest + left.clamp(min=0)) * ORDER  # row of the shares of element 0
    drawn = torch.rand(longest, len(lengths), 1, generator=generator, dtype=shares.dtype)
    at, letters, reached = torch.full_like(lengths, IDENTITY), [], []
    for place in range(longest):  # a training loop waits for this: few operations, flat indices
        letters.append((drawn[place] >= shares.index_select(0, starts[place] + at)).sum(1))
        at = steps().view(-1).index_select(0, at * len(GENERATORS) + letters[-1])
        reached.append(at)
    words = torch.where(left < 0, task.HOLE, torch.stack(letters)).T
    return words, torch.stack(reached, dim=1)
