"""The two expressivity results for Householder transport (PaTH, appendix A), with weights set by hand.

Swaps (theorem 2.1). A single layer with two heads can tell whether a word of swaps of five elements, however long,
leaves everything where it was; for S5 that is as hard as anything in NC1. The first head's key at the start token is
the list 1..5, each swap token reflects it, and the query compares what arrives with the list in order: the logit is
positive for the identity and negative for all else. The second head gives the weight that a logit of zero would have.
Printed slips that change nothing: the e's carry the inverse of the permutation that is defined (the logit is the same),
and W_o's row lacks one of its twelve entries. The product runs as ours does, first swap next to k; as a word and its
inverse are the identity together, the decision itself would not notice a product that ran backwards.

Flip-flop (theorem A.1). Two layers model the flip-flop language without error: the first tells each bit its
instruction, the second finds the last bit that was written. Corrected indices, numbered as printed: layer 2's W_v reads
h10 and h11 (not h8, h9) and its beta is 1{h10 + h11 > 0} (not h8 + h9); FFN 2 is h15 = 1{h2, h13} and h16 = 1{h2, h14}
(both printed as 1{h2, h6}); the head's T is 102 log n, as a bare log n does not reach the error that is claimed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import deadreckon as dr
from deadreckon.ops.attention import Implementation

Entry = tuple[int, int, float]
Swap = tuple[int, int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads gain nothing on tensors this small, and where cores are shared their barriers cost 70 times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def matrix(rows: int, columns: int, *entries: Entry) -> Tensor:
    """Zero but for entries (row, column, value), both counted from 1 as in the paper."""
    result = torch.zeros(rows, columns, dtype=torch.float64)
    for row, column, value in entries:
        result[row - 1, column - 1] = value
    return result


SWAPS: list[Swap] = [(x, y) for x in range(1, 6) for y in range(1, 6) if x != y]
COLUMN = {swap: column for column, swap in enumerate(SWAPS, start=2)}  # column 1 is the start token
SWAP_KEY = matrix(6, 21, *((i, 1, i) for i in range(1, 6)), (6, 1, -1))
SWAP_QUERY = torch.tensor([[1, 2, 3, 4, 5, 54.5]], dtype=torch.float64).T.expand(6, 21)
SWAP_DIRECTION = matrix(6, 21, *((s[end], COLUMN[s], (-1) ** end * 0.5**0.5) for s in SWAPS for end in (0, 1)))
SWAP_VALUE = matrix(6, 21, (1, 1, 1))
SWAP_OUTPUT = matrix(12, 12, (1, 1, 1), (1, 7, -1))


def swap_model(tokens: Tensor, longest: int, impl: Implementation, dtype: torch.dtype, beta: float = 2.0) -> Tensor:
    """The first output dimension (B, T): positive where the word so far is the identity, negative where it is not.

    The query's factor is the paper's n, the longest word. Float32 bears it: after 1000 swaps a logit is off by 2e-4 n
    (measured), and has 0.5 n to spare.
    """
    hidden, nothing = one_hot(tokens, 21).to(dtype), torch.zeros_like(SWAP_KEY)

    def heads(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([hidden @ weight.to(dtype).T for weight in (first, second)], dim=2)

    q, k, v = heads(longest * SWAP_QUERY, nothing), heads(SWAP_KEY, nothing), heads(SWAP_VALUE, SWAP_VALUE)
    transport = dr.Householder(heads(SWAP_DIRECTION, nothing), torch.full_like(k[..., 0], beta))
    out = dr.attend(q, k, v, transport=transport, scale=1.0, impl=impl)
    return (out.flatten(2) @ SWAP_OUTPUT.to(dtype).T)[..., 0]


def arrangements(word: list[Swap]) -> list[list[int]]:
    """The list after 0, 1, 2, ... swaps."""
    states = [[1, 2, 3, 4, 5]]
    for x, y in word:
        after = states[-1].copy()
        after[x - 1], after[y - 1] = after[y - 1], after[x - 1]
        states.append(after)
    return states


def undoing(state: list[int]) -> list[Swap]:
    """Swaps, four at most, which bring every element home."""
    for place, element in enumerate(state, start=1):
        if element != place:
            home = [{place: element, element: place}.get(other, other) for other in state]
            return [(place, state.index(place) + 1), *undoing(home)]
    return []


def swap_batch(length: int) -> tuple[Tensor, Tensor]:
    """Tokens (8, length + 1), four words drawn and four closed, and whether each prefix is the identity."""
    source = random.Random(length)
    words = [source.choices(SWAPS, k=length) for _ in range(4)]
    closed = length - length % 2  # an odd number of swaps is never the identity
    for _ in range(2):
        half = source.choices(SWAPS, k=closed // 2)
        word = source.choices(SWAPS, k=closed - 4)
        word += undoing(arrangements(word)[-1])
        word += [word[0]] * (closed - len(word))  # an even number of times
        words += [[*closing, *source.choices(SWAPS, k=length - closed)] for closing in (half + half[::-1], word)]
    tokens = torch.tensor([[0, *(COLUMN[swap] - 1 for swap in word)] for word in words])
    identity = torch.tensor([[state == sorted(state) for state in arrangements(word)] for word in words])
    assert identity[4:, closed].all() and identity[:4, 1:].any() and not identity[:, 1::2].any()
    return tokens, identity


SWAP_RUNS = [(length, "auto", dtype) for length in (200, 333, 1000) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize(("length", "impl", "dtype"), [*SWAP_RUNS, (200, "reference", torch.float32)])
def test_one_layer_knows_when_swaps_are_the_identity(length: int, impl: Implementation, dtype: torch.dtype) -> None:
    tokens, identity = swap_batch(length)
    output = swap_model(tokens, length, impl, dtype)
    # A lone start token gets all of both heads: the construction says nothing about the empty word.
    assert output[:, 0].abs().max() < 1e-6
    assert torch.equal(output[:, 1:] > 0, identity[:, 1:])
    assert torch.equal(output[:, 1:] < 0, ~identity[:, 1:])
    # With logits of half the longest word the first head's weight is 1 or 0.
    margin = identity.to(dtype) - 1 / torch.arange(1, length + 2, dtype=dtype)
    torch.testing.assert_close(output, margin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_without_reflections_the_swaps_are_lost(beta: float) -> None:
    tokens, identity = swap_batch(200)
    says_identity = swap_model(tokens, 200, "auto", torch.float64, beta) > 0
    assert (says_identity != identity)[:, 1:].any(dim=1).all()  # wrong somewhere in every word


INSTRUCTIONS, BITS = (1, 2, 3), (4, 5)
WRITE, READ, IGNORE, ZERO, ONE = range(5)  # dimensions 1..5 of the embedding


def both(unit: int, one: int, other: int) -> list[Entry]:
    """A hidden unit that is 1 if both dimensions are, and 0 (after the ReLU) if not; dimension 6 is always 1."""
    return [(unit, one, 1), (unit, other, 1), (unit, 6, -1)]


EMBEDDING = matrix(16, 5, *((row, token, 1) for token in INSTRUCTIONS + BITS for row in (token, 6)))
QUERY = matrix(2, 16, (1, 6, 1))
KEY_1 = matrix(2, 16, *((1, instruction, 1) for instruction in INSTRUCTIONS))
DIRECTION_1 = KEY_1 + matrix(2, 16, *((2, bit, 1) for bit in BITS))
VALUE_1 = matrix(16, 16, (7, 1, 1), (8, 2, 1), (9, 3, 1))
FFN_1 = matrix(3, 16, *both(1, 4, 7), *both(2, 5, 7), (3, 6, 1))
FFN_1_OUT = matrix(16, 3, (10, 1, 1), (11, 2, 1), (12, 3, 1), (12, 1, -1), (12, 2, -1))  # written 0, written 1, other
KEY_2 = matrix(2, 16, (1, 10, 1), (1, 11, 1))
DIRECTION_2 = KEY_2 + matrix(2, 16, (2, 12, 1))
VALUE_2 = matrix(16, 16, (13, 10, 1), (14, 11, 1))
FFN_2 = matrix(2, 16, *both(1, 2, 13), *both(2, 2, 14))
FFN_2_OUT = matrix(16, 2, (15, 1, 1), (16, 2, 1))  # a read of 0, a read of 1
ANY_BIT = matrix(5, 16, *((bit, h, 1) for bit in BITS for h in (1, 3)))
ANY_INSTRUCTION = matrix(5, 16, *((instruction, h, 1) for instruction in INSTRUCTIONS for h in BITS))
THAT_BIT = matrix(5, 16, (4, 15, 1), (5, 16, 1))


def flip_flop_model(tokens: Tensor, impl: Implementation = "auto", without: int | None = None) -> Tensor:
    """Next-token probabilities (B, T, 5); `without` is a layer, 1 or 2, whose transport is taken away."""
    n = tokens.shape[1]

    def apply(weight: Tensor, x: Tensor) -> Tensor:
        return x @ weight.float().T

    def layer(h: Tensor, key: Tensor, direction: Tensor, value: Tensor, beta: Tensor) -> Tensor:
        q, k, w, v = (apply(weight, h).unsqueeze(2) for weight in (n * QUERY, key, direction, value))
        transport = dr.Householder(w, beta.unsqueeze(2))
        return h + dr.attend(q, k, v, transport=transport, scale=1.0, impl=impl).squeeze(2)

    h = apply(EMBEDDING, one_hot(tokens, 5).float())
    h = layer(h, KEY_1, DIRECTION_1, VALUE_1, torch.full(tokens.shape, float(without != 1)))
    h = h + apply(FFN_1_OUT, apply(FFN_1, h).relu())
    written = (h[..., 9] + h[..., 10] > 0).float()
    h = layer(h, KEY_2, DIRECTION_2, VALUE_2, written * float(without != 2))
    h = h + apply(FFN_2_OUT, apply(FFN_2, h).relu())
    return apply(102 * math.log(n) * (ANY_BIT + ANY_INSTRUCTION) + n * THAT_BIT, h).softmax(-1)


def flip_flop_batch(batch: int, pairs: int, ignore: float) -> tuple[Tensor, Tensor]:
    """Tokens (B, 2 · pairs), a write first and a read last, and the distribution of each token's successor."""
    source = random.Random(f"{pairs} {ignore}")
    any_bit, any_instruction = [0, 0, 0, 1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3, 0, 0]
    tokens, truth = list[int](), list[list[float]]()
    for _ in range(batch):
        memory = ZERO
        drawn = source.choices((IGNORE, WRITE, READ), (ignore, (1 - ignore) / 2, (1 - ignore) / 2), k=pairs - 2)
        for instruction in [WRITE, *drawn, READ]:
            bit = memory if instruction == READ else source.choice((ZERO, ONE))
            memory = bit if instruction == WRITE else memory
            tokens += [instruction, bit]
            truth += [[float(t == bit) for t in range(5)] if instruction == READ else any_bit, any_instruction]
    return torch.tensor(tokens).view(batch, -1), torch.tensor(truth).view(batch, -1, 5)


def read_errors(probabilities: Tensor, tokens: Tensor) -> float:
    """The share of bits after a read that are predicted wrongly."""
    reads = tokens[:, :-1] == READ
    answers, truth = probabilities[:, :-1].argmax(-1)[reads], tokens[:, 1:][reads]
    assert set(truth.tolist()) == {ZERO, ONE}
    assert len(truth) >= len(tokens)
    return (answers != truth).double().mean().item()


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
@pytest.mark.parametrize(("batch", "pairs", "impl"), [(32, 256, "auto"), (16, 600, "auto"), (4, 256, "reference")])
def test_two_layers_model_flip_flop_exactly(batch: int, pairs: int, impl: Implementation, ignore: float) -> None:
    tokens, truth = flip_flop_batch(batch, pairs, ignore)
    probabilities = flip_flop_model(tokens, impl)
    assert read_errors(probabilities, tokens) == 0
    torch.testing.assert_close(probabilities, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("without", [1, 2])
def test_flip_flop_needs_the_transport_of_both_layers(without: int) -> None:
    tokens, _ = flip_flop_batch(8, 256, 0.1)
    assert read_errors(flip_flop_model(tokens, without=without), tokens) > 0.1
