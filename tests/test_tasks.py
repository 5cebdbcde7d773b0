"""Tasks: the papers' own examples, answers recomputed from the text of rows, and the contract of all tasks."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deadreckon.tasks import TASKS, addition, mqrar, multiplication, odds_first, reverse, scan, stack, task
from deadreckon.tasks.addition import Addition
from deadreckon.tasks.curriculum import PRISM_CURRICULA
from deadreckon.tasks.dynamic_copy import DynamicCopy
from deadreckon.tasks.dynamic_copy import answer as copy_from
from deadreckon.tasks.flipflop import FlipFlop
from deadreckon.tasks.mqrar import MQRAR
from deadreckon.tasks.multiplication import Multiplication
from deadreckon.tasks.odds_first import OddsFirst
from deadreckon.tasks.scan import Scan
from deadreckon.tasks.stack import Stack
from deadreckon.tasks.task import NOT_SCORED, Task, complete, encode, spell

PRISM = tuple(PRISM_CURRICULA)
SOME = {name: range(1, 13) for name in PRISM} | {
    "flip-flop": range(4, 21),
    "a5-products": range(2, 21),
    "a5-identity": range(2, 21),
    "mqrar": range(60, 99),
}


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def rows(one: Task, count: int, length: int | range) -> list[tuple[str, str]]:
    """Question and answer of each row, as text; the answer with its end."""
    tokens, labels = one.sample(count, length, seed())
    pairs = []
    for row, scored in zip(tokens, labels, strict=True):
        question, answer = one.spell(row).split("=")
        assert one.spell(scored[scored != NOT_SCORED]) == answer.strip()
        pairs.append((question.strip(), answer.strip()))
    return pairs


def text(question: Tensor, answer: Tensor) -> str:
    return spell(complete(question, answer)[0][0])


def test_examples_of_the_tables() -> None:
    digits = encode("8349216")
    assert text(digits, digits) == "8349216=8349216."
    assert text(digits, reverse.answer(digits)) == "8349216=6129438."
    assert text(encode("012345"), odds_first.answer(encode("012345"))) == "012345=135024."
    assert text(encode("0110422"), stack.answer(encode("0110422"))) == "0110422=11020000."
    assert text(encode("5839472,3"), copy_from(encode("5839472"), encode("3"))) == "5839472,3=39472."
    assert text(encode("829+03"), addition.answer(encode("829"), encode("03"))) == "829+03=8008,2305,9009→859."
    assert text(encode("675x1259"), multiplication.answer(encode("675"), encode("1259"))) == (
        "675x1259=675x[1*(1→1)(2→0)(5→0)(9→0)+2*(2→1)(5→0)(9→0)+5*(5→1)(9→0)+9*(9→1)]."
    )
    command = "walk around left thrice and look opposite right"
    around = "walk around left : " + 4 * "I_TURN_LEFT I_WALK "
    assert text(encode(command), encode(scan.answer(command))) == (
        f"{command} = walk around left + walk around left + walk around left and look opposite right → "
        f"{3 * around}look opposite right : I_TURN_RIGHT I_TURN_RIGHT I_LOOK ."
    )


@pytest.mark.parametrize("name", TASKS)
def test_contract(name: str) -> None:
    one, lengths = TASKS[name](), SOME[name]
    tokens, labels = one.sample(64, lengths, seed(3))
    assert tokens.shape == labels.shape and tokens.dtype == labels.dtype == torch.long
    assert tokens.min() >= 0 and tokens.max() < one.vocab_size
    scored = labels != NOT_SCORED
    assert scored.any(1).all() and not scored[:, 0].any()
    assert labels[scored].min() >= 0 and labels[scored].max() < one.vocab_size
    assert scored[:, -1].any()  # no column is padding alone
    again, others = one.sample(64, lengths, seed(3)), one.sample(64, lengths, seed(4))
    assert torch.equal(again[0], tokens) and torch.equal(again[1], labels)
    assert others[0].shape != tokens.shape or not torch.equal(others[0], tokens)
    offered = [length for length in lengths if length in one.lengths]
    assert one.sample(3, offered[-1], seed())[0].shape[0] == 3
    with pytest.raises(ValueError, match="count: expected 1 or more, got 0"):
        one.sample(0, offered[0], seed())
    with pytest.raises(ValueError, match=r"length: expected .*, got -2"):
        one.sample(1, -2, seed())
    with pytest.raises(ValueError, match=r"length: expected a range with .* in it, got range\(-5, 0\)"):
        one.sample(1, range(-5, 0), seed())


@pytest.mark.parametrize("name", PRISM)
def test_question_and_padding_are_not_scored(name: str) -> None:
    tokens, labels = TASKS[name]().sample(50, SOME[name], seed(1))
    place = torch.arange(tokens.shape[1])
    equals, end = (((tokens == token).long().argmax(1))[:, None] for token in (task.EQUALS, task.END))
    assert ((tokens == task.EQUALS).sum(1) == 1).all() and ((tokens == task.END).sum(1) == 1).all()
    assert torch.equal(labels != NOT_SCORED, (place > equals) & (place <= end))
    assert torch.equal(tokens == task.PAD, place > end)
    assert (labels == tokens)[labels != NOT_SCORED].all()
    assert len(set(end.flatten().tolist())) > 1  # so that there was padding


@pytest.mark.parametrize("name", ["copy", "reverse", "odds-first"])
def test_digits_rearranged(name: str) -> None:
    rule = {"copy": lambda x: x, "reverse": lambda x: x[::-1], "odds-first": lambda x: x[1::2] + x[::2]}[name]
    pairs = rows(TASKS[name](), 300, range(1, 9))
    assert {len(question) for question, _ in pairs} == set(range(1, 9))
    for question, answer in pairs:
        assert answer == rule(question) + "."
    drawn = rows(TASKS[name](), 200, 50)
    assert all(len(question) == 50 for question, _ in drawn)
    counts = torch.tensor([sum(question.count(digit) for question, _ in drawn) for digit in "0123456789"])
    assert (counts - 1000).abs().max() < 150  # standard deviation 30
    assert any(question[0] == "0" for question, _ in drawn)


def test_odds_first_over_fewer_digits() -> None:
    assert {digit for question, _ in rows(OddsFirst(digits=2), 20, 20) for digit in question} == {"0", "1"}
    with pytest.raises(ValueError, match="digits: expected 2 to 10, got 1"):
        OddsFirst(digits=1)


def test_dynamic_copy() -> None:
    pairs, starts = rows(DynamicCopy(), 2000, 4), [0] * 4
    for question, answer in pairs + rows(DynamicCopy(), 200, range(1, 30)):
        digits, first = question.split(",")
        assert digits.count(first) == 1 and answer == digits[digits.index(first) :] + "."
    for question, _ in pairs:
        starts[question.index(question[-1])] += 1
    assert max(abs(start - 500) for start in starts) < 100  # standard deviation 19
    assert {question[-1] for question, _ in pairs} == set("0123456789")


def test_stack() -> None:
    heights, on_empty = set(), 0
    for question, answer in rows(Stack(), 500, 7) + rows(Stack(), 500, range(1, 41)):
        bits = re.match("[01]+", question)
        assert bits and not set(question[bits.end() :]) & set("01")
        left = list(bits.group())
        for action in question[bits.end() :]:
            on_empty += action == "2" and not left
            if action != "2":
                left.append(str(int(action) - 3))
            elif left:
                left.pop()
        assert answer == ("".join(reversed(left)) + "2").ljust(len(question) + 1, "0") + "."
        if len(question) == 7:
            heights.add(bits.end())
    assert heights == set(range(1, 7)) and on_empty > 10
    assert {answer for _, answer in rows(Stack(), 50, 1)} == {"02.", "12."}


def check_addition(question: str, answer: str) -> None:
    one, other = question.split("+")
    steps, total = answer[:-1].split("→")
    assert total[::-1] == str(int(one[::-1]) + int(other[::-1]))
    carry, written = 0, steps.split(",")
    assert len(written) == max(len(one), len(other))
    for place, step in enumerate(written):
        a, b = (int(number[place]) if place < len(number) else 0 for number in (one, other))
        carry, digit = divmod(a + b + carry, 10)
        assert step == f"{a}{b}{carry}{digit}"


def check_multiplication(question: str, answer: str) -> None:
    one, other = question.split("x")
    whole = re.fullmatch(rf"{one}x\[(.*)\]\.", answer)
    assert whole
    terms, total = whole.group(1).split("+"), 0
    assert len(terms) == len(other)
    for place, term in enumerate(terms):
        digit, mapped = term.split("*")
        maps = re.findall(r"\((\d)→(\d)\)", mapped)
        assert mapped == "".join(f"({digit}→{value})" for digit, value in maps)
        assert "".join(digit for digit, _ in maps) == other[place:] and digit == other[place]
        total += int(digit) * int("".join(value for _, value in maps))
    assert total == int(other)


@pytest.mark.parametrize(("one", "check"), [(Addition, check_addition), (Multiplication, check_multiplication)])
def test_arithmetic(one: type[Addition], check: object) -> None:
    for question, answer in rows(one(), 400, range(1, 12)) + rows(one(), 20, 25):
        check(question, answer)
    pairs, leading = rows(one(), 400, 5), -1 if one is Addition else 0
    sizes = [tuple(len(number) for number in re.split(r"\+|x", question)) for question, _ in pairs]
    assert set(sizes) == {(5, n) for n in range(1, 6)} | {(n, 5) for n in range(1, 6)}
    numbers = [number for question, _ in pairs for number in re.split(r"\+|x", question)]
    assert all(number[leading] != "0" for number in numbers if len(number) > 1)
    assert {number for number in numbers if len(number) == 1} == set("0123456789")
    for question, answer in rows(one(equal=True), 100, range(1, 6)):
        check(question, answer)
        assert len(set(map(len, re.split(r"\+|x", question)))) == 1


def test_addition_carries_all_the_way() -> None:
    ones = addition.answer(encode("99999"), encode("1"))
    assert text(encode("99999+1"), ones) == "99999+1=9110,9010,9010,9010,9010→000001."
    check_addition("5+5", "5510→01.")


def test_scan_is_the_published_corpus() -> None:
    train_pairs, test_pairs = scan.length_split()
    assert (len(train_pairs), len(test_pairs)) == (16_990, 3_920)
    assert len({command for command, _ in train_pairs + test_pairs}) == 20_910
    assert {len(actions.split()) for _, actions in train_pairs} == set(range(1, 23))
    test_lengths = {len(actions.split()) for _, actions in test_pairs}
    assert min(test_lengths) == 24 and max(test_lengths) == 48
    meaning = dict(train_pairs + test_pairs)
    left, right = "I_TURN_LEFT", "I_TURN_RIGHT"
    for command, actions in {
        "jump": "I_JUMP",
        "jump left": f"{left} I_JUMP",
        "jump around right": " ".join([f"{right} I_JUMP"] * 4),
        "turn left": left,
        "turn left twice": f"{left} {left}",
        "turn opposite right": f"{right} {right}",
        "turn around left": " ".join([left] * 4),
        "jump thrice": "I_JUMP I_JUMP I_JUMP",
        "run opposite right twice": f"{right} {right} I_RUN {right} {right} I_RUN",
        "jump opposite left and walk thrice": f"{left} {left} I_JUMP I_WALK I_WALK I_WALK",
        "jump opposite left after walk around left": " ".join([f"{left} I_WALK"] * 4) + f" {left} {left} I_JUMP",
    }.items():
        assert meaning[command] == actions
    for one, other in product(("look twice", "turn right", "run around left"), repeat=2):
        assert meaning[f"{one} and {other}"] == meaning[f"{other} after {one}"] == f"{meaning[one]} {meaning[other]}"


@pytest.mark.parametrize("split", ["train", "test"])
def test_scan_thinks_and_acts_as_the_corpus(split: str) -> None:
    corpus = dict(scan.length_split()[split == "test"])
    tokens, labels = Scan(split).everything()
    assert len(tokens) == len(corpus)
    met = set()
    for row, scored in zip(tokens[::7], labels[::7], strict=True):
        command, said = Scan().spell(row).split(" = ")
        met.add(command)
        assert Scan().spell(scored[scored != NOT_SCORED]) == said
        clauses, steps = said.removesuffix(" .").split(" → ")
        assert re.findall(r"I_\w+", steps) == corpus[command].split()
        shortened = re.sub(r"\b(\w[\w ]*?) \+ \1 \+ \1(?= and| after|$)", r"\1 thrice", clauses)
        assert re.sub(r"\b(\w[\w ]*?) \+ \1(?= and| after|$)", r"\1 twice", shortened) == command
        done = [step.strip() for step in re.split(r"(?:: )?(?:I_\w+ ?)+", steps) if step]
        parts = clauses.split(" after ")[::-1] if " after " in clauses else clauses.split(" and ")
        assert done == " + ".join(parts).split(" + ")
    assert len(met) == len(tokens[::7])


def test_scan_is_drawn_by_its_lengths() -> None:
    """`docs/scan.py` counts each command once, and every token on one side of =."""
    picture = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "scan.py"))
    for split, pairs in zip(("train", "test"), scan.length_split(), strict=True):
        found = picture["lengths"](split)
        assert sorted(found["left of ="].tolist()) == sorted(len(command.split()) for command, _ in pairs)
        said = sorted(len(scan.answer(command).split()) + 1 for command, _ in pairs)  # with the end
        assert sorted(found["right of ="].tolist()) == said
        assert torch.equal(found["whole sequence"], found["left of ="] + 1 + found["right of ="])


def test_scan_draws_every_command_alike() -> None:
    train_pairs, _ = scan.length_split()
    tokens, _ = Scan().sample(4000, range(1, 23), seed())
    drawn = [Scan().spell(row).count("I_") for row in tokens]
    expected = sum(actions.count("I_") for _, actions in train_pairs) / len(train_pairs)
    assert abs(sum(drawn) / len(drawn) - expected) < 0.5  # standard deviation 0.1
    short = Counter(Scan().spell(row).split(" =")[0] for row in Scan().sample(600, 1, seed())[0])
    assert short.keys() == {command for command, actions in train_pairs if actions.count("I_") == 1}
    mean = 600 / len(short)
    assert all(abs(count - mean) < 4 * mean**0.5 for count in short.values())  # four standard deviations
    assert all(Scan("test").spell(row).count("I_") == 26 for row in Scan("test").sample(20, 26, seed())[0])
    with pytest.raises(ValueError, match=r"length: expected one of 24, 25, .*, got 23"):
        Scan("test").sample(1, 23, seed())
    with pytest.raises(ValueError, match="split: expected 'train' or 'test', got 'valid'"):
        Scan("valid")


def test_mqrar_example() -> None:
    pairs = ["k1", "v4", "k2", "v7", "k1", "v9", "k1", "?", "k2", "v3", "k1", "v5", "k1", "?", "k2", "?"]
    keys = torch.tensor([[int(key[1:]) for key in pairs[::2]]])
    values = torch.tensor([[int(value[1:] or 0) for value in pairs[1::2]]])
    asks = torch.tensor([[value == "?" for value in pairs[1::2]]])
    still, said = mqrar.recall(keys, values, asks, back=2)
    assert torch.equal(still, asks) and said[asks].tolist() == [4, 9, 7]


@pytest.mark.parametrize("back", [1, 2, 4])
def test_mqrar(back: int) -> None:
    one = MQRAR(back=back, keys=6, values=9)
    least = one.lengths[0]
    for length in (least, range(least, 90), 100):
        tokens, labels = one.sample(60, length, seed())
        for row, scored in zip(tokens, labels, strict=True):
            words, past = one.spell(row).split(), {}
            assert len(words) in ([length] if isinstance(length, int) else length) and words[-1] == "?"
            assert (scored[len(words) :] == NOT_SCORED).all()
            for place in range(0, len(words), 2):
                key, value = words[place : place + 2]
                assert key[0] == "k" and 1 <= int(key[1:]) <= 6 and scored[place] == NOT_SCORED
                had = past.setdefault(key, [])
                if value == "?":
                    assert one.spell(scored[place + 1 : place + 2]) == had[-back]
                else:
                    assert value[0] == "v" and 1 <= int(value[1:]) <= 9 and scored[place + 1] == NOT_SCORED
                    had.append(value)


def test_mqrar_as_in_the_paper() -> None:
    tokens, labels = MQRAR(back=4).sample(40, 768, seed())
    assert tokens.shape == (40, 768)
    assert 90 < (labels != NOT_SCORED).sum() / 40 < 150  # half of 384 pairs less the first four of 32 keys: 128
    with pytest.raises(ValueError, match="length: expected 196 or more in steps of 2, got 194"):
        MQRAR(back=4).sample(1, 194, seed())
    with pytest.raises(ValueError, match="back: expected 1 or more, got 0"):
        MQRAR(back=0)
    with pytest.raises(ValueError, match="keys: expected fewer than 32768, got 32768"):
        MQRAR(keys=2**15)
    with pytest.raises(ValueError, match=r"asking: expected a probability, got 1\.5"):
        MQRAR(asking=1.5)


def test_flipflop_of_many_lengths() -> None:
    tokens, labels = FlipFlop(0.5).sample(200, range(4, 13), seed())
    met = set()
    for row, scored in zip(tokens, labels, strict=True):
        symbols, memory = FlipFlop().spell(row).split(), None
        met.add(len(symbols))
        for place in range(0, len(symbols), 2):
            instruction, bit = symbols[place : place + 2]
            memory = bit if instruction == "w" else memory
            assert (scored[place + 1] != NOT_SCORED) == (instruction == "r")
            assert instruction != "r" or bit == memory
        assert symbols[-2] == "r" and (scored[len(symbols) :] == NOT_SCORED).all()
    assert met == {4, 6, 8, 10, 12}


def test_text_and_holes() -> None:
    assert spell(encode("walk left = 1 2+ 3")[0]) == "walk left =12+3"
    assert spell(torch.tensor([task.PAD])) == ""
    with pytest.raises(ValueError, match="text: expected words of the alphabet, got 'fly' in 'fly left'"):
        encode("fly left")
    holes = torch.tensor([[-1, 3, -1, 4], [5, -1, -1, -1]])
    assert task.compact(holes).tolist() == [[3, 4], [5, task.PAD]]
    assert len(set(task.ALPHABET)) == len(task.ALPHABET) <= task.VOCAB_SIZE
