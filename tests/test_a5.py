"""The A5 word problem: answers recomputed from the text of rows, and how rows are sampled."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from deadreckon.tasks import a5
from deadreckon.tasks.a5 import A5Identity, A5Products
from deadreckon.tasks.task import NOT_SCORED


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def compose(factors: list[str]) -> str:
    """What becomes of 12345 if permutations are carried out one after another."""
    images = list("12345")
    for factor in factors:
        images = [factor[int(image) - 1] for image in images]
    return "".join(images)


def test_a5_products() -> None:
    assert len(set(a5.elements())) == 60 and a5.elements()[a5.IDENTITY] == "12345"
    reads = torch.tensor([[a5.elements().index(word) for word in ("21354", "31245", "31245")]])
    assert A5Products().spell(a5.products(reads)[0]) == "21354 13254 32154"
    tokens, labels = A5Products().sample(400, range(2, 21), seed())
    assert set((labels != NOT_SCORED).sum(1).tolist()) == set(range(2, 21))
    for row, scored in zip(tokens, labels, strict=True):
        words = A5Products().spell(row).split()
        assert row[0] == a5.ORDER and (row[len(words) + 1 :] == a5.ORDER).all() and len(row) > len(words) + 1
        expected = [compose(words[: place + 1]) for place in range(len(words))]
        assert A5Products().spell(scored[2 : len(words) + 2]).split() == expected
        assert (scored[:2] == NOT_SCORED).all() and (scored[len(words) + 2 :] == NOT_SCORED).all()


def test_a5_parts_stay_what_they_were() -> None:
    """The hash, as it is defined: saved models were not trained on rows that it keeps for testing."""
    rows, lengths = torch.randint(0, 60, (500, 30), generator=seed()), torch.randint(1, 31, (500,), generator=seed())
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        code = 0
        for element in row[:length]:
            code = (code * 1_103_515_245 + element + 12_345) % (2**31 - 1)
        filled = torch.tensor([row[:length] + [a5.ORDER] * (30 - length)])
        assert bool(a5.is_for_testing(filled)) == ((code * 48_271 % (2**31 - 1)) % 5 == 0)


def test_a5_parts_are_apart_and_a_fifth() -> None:
    everything = torch.tensor(list(product(range(60), repeat=2)))
    assert abs(a5.is_for_testing(everything).float().mean() - 0.2) < 0.01
    drawn = {
        part: {tuple(row) for row in A5Products(part).sample(2000, 2, seed())[0].tolist()} for part in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"] and len(drawn["train"]) > 1400 and len(drawn["test"]) > 500
    mixed, _ = A5Products("test").sample(200, range(2, 6), seed())
    alone, _ = A5Products("test").sample(200, 3, seed())
    assert a5.is_for_testing(mixed[:, 1:-1]).all() and a5.is_for_testing(alone[:, 1:-1]).all()
    with pytest.raises(ValueError, match="part: expected 'train', 'test' or 'all', got 'dev'"):
        A5Products("dev")


CYCLES = {"g1": "23145", "g2": "24315", "g3": "25341"}
LETTERS = CYCLES | {f"{name}'": compose([cycle, cycle]) for name, cycle in CYCLES.items()}  # of order three


def test_a5_identity() -> None:
    spelled = [A5Identity().spell(row) for row in A5Identity().sample(2000, range(2, 30), seed())[0]]
    for row in spelled:
        word, said = row.split(" = ")
        assert said == ("yes" if compose([LETTERS[letter] for letter in word.split()]) == "12345" else "no")
    assert abs(sum(row.endswith("yes") for row in spelled) - 1000) < 120  # standard deviation 22
    assert {len(row.split()) - 2 for row in spelled} == set(range(2, 30))
    commutator = [LETTERS[letter] for letter in ["g1", "g2", "g1'", "g2'"]]
    assert compose(commutator) != "12345"
    tokens, labels = A5Identity().sample(50, 9, seed())
    assert ((labels != NOT_SCORED).sum(1) == 1).all() and (labels[:, -1] == tokens[:, -1]).all()
    assert tokens.shape[1] == 1 + 9 + 2 and (tokens[:, 0] == a5.PAD).all() and (tokens[:, 1:] != a5.PAD).all()
    with pytest.raises(ValueError, match="identity: expected a share or None, got 2"):
        A5Identity(2)
    with pytest.raises(ValueError, match="asked: expected 'end', 'prefixes' or 'products', got 'all'"):
        A5Identity(asked="all")


@pytest.mark.parametrize("asked", ["prefixes", "products"])
def test_a5_identity_asks_after_each_letter(asked: str) -> None:
    """What is to be said after a letter, and what stands there as without."""
    task = A5Identity(asked=asked)
    tokens, labels = task.sample(200, range(2, 12), seed())
    assert task.vocab_size == {"prefixes": 10, "products": 70}[asked] and labels.max() < task.vocab_size
    plain, answers = A5Identity().sample(200, range(2, 12), seed())
    assert torch.equal(tokens, plain)
    for row, said, answer in zip(tokens, labels, answers, strict=True):
        word = A5Identity().spell(row).split(" = ")[0].split()
        so_far = [compose([LETTERS[letter] for letter in word[: i + 1]]) for i in range(len(word))]
        if asked == "prefixes":
            expected = [a5.YES if product == "12345" else a5.NO for product in so_far]
        else:
            expected = [len(a5.WORDS) + a5.elements().index(product) for product in so_far]
        assert said[2 : len(word) + 2].tolist() == expected
        assert torch.equal(said[len(word) + 2 :], answer[len(word) + 2 :]) and (said[:2] == NOT_SCORED).all()


def test_a5_words_are_products_of_one_swap_a_letter() -> None:
    """What `a5.py` says: (1 x) or (2 x), by the letter and its place, and (1 2) at the end of a word of odd length."""

    def swap(x: int, y: int) -> str:
        return "12345".translate({48 + x: str(y), 48 + y: str(x)})

    for row in A5Identity(identity=None).sample(300, range(2, 12), seed())[0]:
        letters = A5Identity().spell(row).split(" = ")[0].split()
        swaps = []
        for place, letter in enumerate(letters):
            with_two = place % 2 == (1 if letter.endswith("'") else 0)  # places counted from 0
            swaps.append(swap(2 if with_two else 1, int(letter[1]) + 2))
        swaps += [swap(1, 2)] * (len(letters) % 2)
        assert compose(swaps) == compose([LETTERS[letter] for letter in letters])


def test_a5_identity_draws_every_word_alike() -> None:
    words = [" ".join(word) for word in product(LETTERS, repeat=4)]
    identities = {word for word in words if compose([LETTERS[letter] for letter in word.split()]) == "12345"}
    tokens, _ = A5Identity(identity=1.0).sample(100 * len(identities), 4, seed())
    drawn = [A5Identity().spell(row).split(" = ")[0] for row in tokens]
    assert set(drawn) == identities
    assert all(50 < drawn.count(word) < 160 for word in identities)  # standard deviation 10
    labels = A5Identity(identity=0.0).sample(500, 4, seed())[1]
    assert (labels[:, -1] == a5.NO).all()
    for length, rate in ((2, 1 / 6), (20, 1 / 60)):  # as the file says
        labels = A5Identity(identity=None).sample(4000, length, seed())[1]
        assert abs((labels == a5.YES).sum() / 4000 - rate) < 6 * (rate / 4000) ** 0.5
