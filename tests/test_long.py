"""The long-context suite: questions, prompt lengths, scoring, and training rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from readers import NEEDLE, NOISE, READERS, read
from tokenizers import Tokenizer

from deadreckon.tasks.addition import Addition
from deadreckon.tasks.copy import Copy
from deadreckon.tasks.language import Language, load_corpus
from deadreckon.tasks.long import BABILONG, LONG_TASKS, make_long_tasks
from deadreckon.tasks.long.babilong import Story, parse_stories, read_babilong
from deadreckon.tasks.long.common_words import CommonWords
from deadreckon.tasks.long.frequent_words import FrequentWords
from deadreckon.tasks.long.passkey import Passkey
from deadreckon.tasks.long.phonebook import PhoneBook
from deadreckon.tasks.long.question import LongTask, Question, draw, fit
from deadreckon.tasks.long.rows import Questions, Scale
from deadreckon.tasks.long.variable_tracking import VariableTracking
from deadreckon.tasks.long.words import names, words
from deadreckon.tasks.mixture import Mixture
from deadreckon.tasks.mqrar import MQRAR
from deadreckon.tasks.task import NOT_SCORED
from deadreckon.tasks.task import draw as draw_batches
from deadreckon.tasks.tokens import END, train_tokenizer

PEOPLE, PLACES = ("Mary", "John", "Sandra"), ("garden", "office", "kitchen", "hallway")


def babi_lines(stories: int) -> str:
    """qa1 of bAbI as its authors write it, made up."""
    random, lines = Random(0), []
    for _ in range(stories):
        where: dict[str, str] = {}
        for number in range(1, 10):
            if number % 3:
                where[who := random.choice(PEOPLE)] = random.choice(PLACES)
                lines.append(f"{number} {who} went to the {where[who]}.")
            else:
                lines.append(f"{number} Where is {who}? \t{where[who]}\t{number - 1}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """bAbI's stories and a book, in files."""
    folder = tmp_path_factory.mktemp("data")
    book = " ".join(
        f'"It was day number {number}," said Mr. Moon, "and nothing came of it." ' for number in range(2000)
    )
    (folder / "babi.jsonl").write_text(json.dumps({"task": "qa1", "text": babi_lines(20)}) + "\n")
    (folder / "books.jsonl").write_text(json.dumps({"text": book}) + "\n")
    return {"babi": str(folder / "babi.jsonl"), "books": str(folder / "books.jsonl")}


@pytest.fixture(scope="module")
def tasks(data: dict[str, str]) -> dict[str, LongTask]:
    return make_long_tasks([*LONG_TASKS, "babilong-qa1"], **data)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [draw(make(), number, 2048, 60).prompt for make in LONG_TASKS.values() for number in range(2)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return train_tokenizer(folder / "a.jsonl", 1500, cache=folder)


@pytest.mark.parametrize("name", READERS)
def test_what_is_asked_can_be_read(name: str, tasks: dict[str, LongTask]) -> None:
    """Answers follow from the prompt, at both of cwe's rules; references say so too."""
    task, answers = tasks[name], Counter()
    for number in range(8):
        for length, size in ((2048, task.least + 60), (8192, task.least + 90)):
            question = draw(task, number, length, size)
            found = READERS[name](question.prompt)
            assert sorted(found) == sorted(question.references)
            assert question.answer.startswith(" ") and question.answer == question.answer.rstrip()
            assert all(one in question.answer for one in found)
            assert task.score(question, question.answer) == 1 and task.score(question, " I do not know.") == 0
            answers[tuple(found)] += 1
    assert len(answers) > 2  # questions differ


def test_needles_are_in_noise_or_among_each_other(tasks: dict[str, LongTask]) -> None:
    lines = draw(tasks["niah-single"], 3, 2048, 40).prompt.split("\n")[1:-1]
    assert Counter(lines)[NOISE] == 40 and len(lines) == 41
    for name, pattern in (
        ("niah-multikey", r"[a-z]+-[a-z]+ \d{7}"),
        ("niah-multikey-uuids", r"[0-9a-f-]{36} [0-9a-f-]{36}"),
    ):
        lines = draw(tasks[name], 3, 2048, 40).prompt.split("\n")[1:-1]
        pairs = [NEEDLE.fullmatch(line).groups() for line in lines]  # type: ignore[union-attr]
        assert len(pairs) == 41 and all(re.fullmatch(pattern, " ".join(pair)) for pair in pairs)
    depths = [draw(tasks["niah-single"], number, 2048, 40).depth for number in range(40)]
    assert min(depths) < 0.2 and max(depths) > 0.8 and len(set(depths)) > 15


def test_depths_of_the_passkey() -> None:
    for number in range(22):
        question = draw(Passkey(), number, 2048, 500)
        before = question.prompt.index("The pass key is") - len(question.prompt.split("\n")[0])
        assert question.depth == number % 11 / 10
        assert before / (500 * 18) == pytest.approx(question.depth, abs=0.02)  # 18 characters a sentence
    assert draw(Passkey(), 5, 2048, 500).prompt.count(" Here we go.") == 100
    with pytest.raises(ValueError, match="depths: expected 2 or more, got 1"):
        Passkey(depths=1)


def test_chains_of_variables() -> None:
    question = draw(VariableTracking(hops=6), 0, 2048, 30)
    text = question.prompt.split("Memorize and track")[2]
    assert len(set(question.references)) == 7 and all(len(name) == 5 for name in question.references)
    assert re.findall(r"VAR (\w+) =", text) == list(question.references)  # in order
    assert text.count(NOISE) == 30 and "7 variables are assgined the value" in text  # as RULER spells it
    start = draw(VariableTracking(hops=1), 3, 2048, 2).prompt.split("Memorize and track")[2]
    names = re.findall(r"VAR (\w+) =", start)
    [number] = re.findall(r"= (\d+)", start)
    parts = f"VAR {names[0]} = {number} {NOISE}\n VAR {names[1]} = VAR {names[0]}  {NOISE}\n\nQuestion: Find all"
    assert parts in start  # parts have a blank between them, noise ends a line
    with pytest.raises(ValueError, match="hops: expected 0 to 9, got 10"):
        VariableTracking(hops=10)


@pytest.mark.parametrize(("length", "common", "other", "shots"), [(4095, 6, 1, (3, 1, 20)), (4096, 30, 3, (10, 3, 40))])
def test_repeats_of_common_words(length: int, common: int, other: int, shots: tuple[int, int, int]) -> None:
    question = draw(CommonWords(), 1, length, 25)
    lists = [text.split("\n")[1] for text in question.prompt.split("Below is a numbered list")[1:]]
    counts = [Counter(re.findall(r"\d+\. (\w+)", text)) for text in lists]
    assert Counter(counts[1].values()) == {common: 10, other: 25}
    assert Counter(counts[0].values()) == {shots[0]: 10, shots[1]: shots[2] - 10}
    assert all(question.answer.index(f" {place}. ") >= 0 for place in range(1, 11))
    everything = words()
    assert len(set(everything)) == len(everything) > 5000
    letters = " ".join(everything)  # no word is part of another: each is found once
    assert all(letters.count(word) == 1 for word in Random(0).sample(everything, 300))


def test_frequencies_of_coded_words() -> None:
    text = draw(FrequentWords(), 1, 4050, 1000).prompt.split("coded words. ")[1].split("\nQuestion")[0]
    counts = Counter(text.split()).most_common()
    assert len(counts) <= 80 and counts[0][0] == "..."
    assert [count for _, count in counts[:6]] == [int(1000 / rank**2 / 1.6449340668) for rank in range(1, 7)]
    for size in range(FrequentWords().least, 2000):  # three are more frequent than all others
        assert int(size / 16 / 1.6449340668) > int(size / 25 / 1.6449340668)


def test_stories(data: dict[str, str]) -> None:
    told = parse_stories(
        "1 A went.\n2 Where is A? \tx\t1\n3 B went.\n4 Where is B?\ty\t3\n1 C went.\n2 Where is C?\tz\t1\n"
    )
    assert told == [
        [Story(("A went.",), "Where is A?", "x"), Story(("A went.", "B went."), "Where is B?", "y")],
        [Story(("C went.",), "Where is C?", "z")],
    ]
    with pytest.raises(ValueError, match="babi: expected a number and a fact"):
        parse_stories("Mary went to the garden.\n")
    parts = {part: read_babilong(**data, part=part)["qa1"] for part in ("train", "test")}
    told = parse_stories(babi_lines(20))
    assert list(parts["test"].stories) == [story for stories in told[::5] for story in stories]
    assert len(parts["train"].stories) == 48 and not set(parts["train"].sentences) & set(parts["test"].sentences)
    assert len(parts["test"].sentences) == 400
    assert parts["test"].sentences[0] == '"It was day number 1600," said Mr. Moon, "and nothing came of it."'
    question = draw(parts["test"], 0, 2048, 50)
    text = question.prompt.split("\n\nText: ")[-1]
    assert text.count("Mr. Moon") == 50 and question.prompt.count("\nAnswer:") == 3
    assert [place for _, place in re.findall(r"(\w+) went to the (\w+)\.", text)]
    with pytest.raises(ValueError, match="part: expected one of train, test; got 'valid'"):
        read_babilong(**data, part="valid")


def test_facts_keep_their_order(data: dict[str, str]) -> None:
    task, scattered = read_babilong(**data)["qa1"], 0
    facts = {story.question + story.answer + " ".join(story.facts) for story in task.stories}
    for number in range(10):
        text = draw(task, number, 2048, 40).prompt.split("\n\nText: ")[-1]
        told = " ".join(f"{who} went to the {where}." for who, where in re.findall(r"(\w+) went to the (\w+)\.", text))
        question = re.findall(r"Question: (.*)\n", text)[0]
        assert any(fact.startswith(question) and fact.endswith(told) for fact in facts)
        scattered += told not in text
    assert scattered > 5


@pytest.mark.parametrize(
    ("name", "question", "said", "score"),
    [
        ("passkey", Question("", "", ("12345",)), " 12345. Remember it.", 1),
        ("passkey", Question("", "", ("12345",)), " the number 12345", 1),
        ("passkey", Question("", "", ("12345",)), " 123456", 0),
        ("passkey", Question("", "", ("12345",)), " 54321 12345", 0),
        ("passkey", Question("", "", ("12345",)), "", 0),
        ("niah-single", Question("", "", ("7182818",)), " x 7182818.", 1),
        ("niah-multikey-uuids", Question("", "", ("ab-1F",)), " AB-1f", 1),
        ("vt", Question("", "", ("AAA", "BBB", "CCC", "DDD", "EEE")), "aaa BBB EEE", 0.6),
        ("cwe", Question("", "", tuple("abcdefghij")), " 1. a 2. z 3. j", 0.2),
        ("fwe", Question("", "", ("abc", "def", "ghi")), " def ghi xyz", 2 / 3),
        ("phonebook", Question("", "", ("9120457713",)), " 9120457713\nNora: 1", 1),
        ("phonebook", Question("", "", ("9120457713",)), " 91204577130", 0),
        ("phonebook", Question("", "", ("9120457713",)), " is\n9120457713", 0),
        ("babilong-qa1", Question("", "", ("office",), "Where is Mary?"), " office. Not the garden.", 1),
        ("babilong-qa1", Question("", "", ("office",), "Where is Mary?"), " the Office", 1),
        ("babilong-qa1", Question("", "", ("office",), "Where is Mary?"), " office or garden.", 0),
        ("babilong-qa1", Question("", "", ("office",), "Where is Mary?"), " near. office", 0),
        ("babilong-qa1", Question("", "", ("office",), "What is north of the garden?"), " garden: office", 1),
    ],
)
def test_scores(name: str, question: Question, said: str, score: float, tasks: dict[str, LongTask]) -> None:
    assert tasks[name].score(question, said) == pytest.approx(score)


@pytest.mark.parametrize("name", READERS)
def test_lengths_are_used_up(name: str, tasks: dict[str, LongTask], tokenizer: Tokenizer) -> None:
    """The prompt and its answer fit; one unit more would not."""
    task = tasks[name]
    counts: dict[str, Callable[[str], int]] = {
        "tokens": lambda text: len(tokenizer.encode(text).ids), "words": lambda text: len(text.split()),
    }  # fmt: skip
    for count in counts.values():
        sizes = []
        for number, length in ((0, 1800), (1, 1800), (1, 3001)):
            fitted = fit(task, number, length, count)
            sizes.append(fitted.size)
            assert fitted.tokens == count(fitted.question.prompt) <= length - task.new_tokens
            assert fitted.question == draw(task, number, length, fitted.size)
            larger = count(draw(task, number, length, fitted.size + 1).prompt)
            assert larger > length - task.new_tokens
            for near in (fitted.size, 2 * fitted.size) if number == 0 else ():
                assert fit(task, number, length, count, near=near) == fitted
            assert sorted(read(fitted.question.prompt)) == sorted(fitted.question.references)
        assert sizes[2] > sizes[1]
    short, long = (fit(task, 4, length, counts["tokens"]).question for length in (2000, 4000))
    assert short.references == long.references or name == "cwe"  # the same question in more text
    assert fit(task, 4, 2000, counts["tokens"], seed=1).question.prompt != short.prompt
    with pytest.raises(ValueError, match=r"length: expected at least \d+ tokens for \w+, got 50"):
        fit(task, 0, 50, counts["tokens"])


def test_a_fit_takes_few_tries(tasks: dict[str, LongTask]) -> None:
    tries = 0

    def count(text: str) -> int:
        nonlocal tries
        tries += 1
        return len(text)

    for task in tasks.values():
        first = fit(task, 0, 20_000, count)
        tries = 0
        fit(task, 1, 20_000, count, near=first.size)
        assert tries <= 12


def test_text_runs_out() -> None:
    assert len(names()[0]) * len(names()[1]) == 2 * PhoneBook().most
    few = CommonWords()
    with pytest.raises(ValueError, match=r"length: expected about \d+ tokens at most, .* CommonWords has, got 1000000"):
        fit(few, 0, 1_000_000, lambda text: len(text.split()))


def test_tasks_by_name(data: dict[str, str], tmp_path: Path) -> None:
    assert list(make_long_tasks()) == list(LONG_TASKS)
    assert list(make_long_tasks(["vt", "passkey"])) == ["vt", "passkey"]
    for names_, keywords, message in (
        (["qa9"], {}, "tasks: expected some of passkey, .*; got 'qa9'"),
        (["babilong"], {}, "babi, books: expected files for babilong-qa1, got none"),
        ((), {"babi": data["babi"]}, "babi, books: expected both or none, got babi='.*', books=''"),
        (["babilong"], data, "babi: expected a line for qa2 in .*, got qa1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_long_tasks(names_, **keywords)  # type: ignore[arg-type]
    assert tuple(f"babilong-qa{n}" for n in range(1, 6)) == BABILONG


def test_rows_to_train_on(tasks: dict[str, LongTask], tokenizer: Tokenizer) -> None:
    """A row is a prompt, the answer that its text gives, and the end; the prompt is not scored."""
    questions, seen = Questions(tasks, tokenizer), Counter()
    tokens, labels = questions.sample(40, 1600, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape and tokens.shape[1] <= 1600
    for row, scored in zip(tokens, labels, strict=True):
        places = (scored != NOT_SCORED).nonzero().flatten()
        first, last = int(places[0]), int(places[-1])
        assert places.tolist() == list(range(first, last + 1)) and torch.equal(
            row[first : last + 1], scored[first : last + 1]
        )
        assert (row[last:] == questions.document_end).all() and last > 0.7 * 1600
        prompt, answer = questions.spell(row[:first]), questions.spell(row[first : last + 1])
        assert answer.endswith(END) and all(one in answer for one in read(prompt))
        seen[prompt[:12]] += 1
    assert len(seen) >= 6
    again = questions.sample(40, 1600, torch.Generator().manual_seed(0))
    assert torch.equal(again[0], tokens) and torch.equal(again[1], labels)
    lengths = range(questions.lengths[0], 1000)
    used = (questions.sample(60, lengths, torch.Generator().manual_seed(1))[1] != NOT_SCORED).int().argmax(1)
    assert int(used.max()) < 1000 and int(used.min()) < 300
    with pytest.raises(ValueError, match=r"length: expected \d+ or more, got 3"):
        questions.sample(1, 3, torch.Generator())
    short = Questions({"vt": tasks["vt"]}, tokenizer)
    vars(short)["_scales"] = {"vt": Scale(10, 1.0)}  # as if questions were so short: none ever fits
    with pytest.raises(ValueError, match="length: expected room for a question of vt, got 20 tokens"):
        short.sample(1, 20, torch.Generator())


def test_mixture(tmp_path: Path, tasks: dict[str, LongTask], tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the sea was calm and the wind had gone " * 2000)
    text = Language(load_corpus(tmp_path / "a.txt", tokenizer=tokenizer, cache=tmp_path), packed=True)
    questions = Questions({"phonebook": tasks["phonebook"]}, tokenizer)
    mixture = Mixture(text, questions, 0.3)
    tokens, labels = mixture.sample(200, 400, torch.Generator().manual_seed(0))
    plain, scored = text.sample(200, 400, torch.Generator().manual_seed(0))
    changed = (tokens != plain).any(1)
    assert tokens.shape == (200, 400) and 35 <= int(changed.sum()) <= 85  # 60 ± 4 standard deviations
    assert torch.equal(tokens[~changed], plain[~changed]) and torch.equal(labels[~changed], scored[~changed])
    firsts, count, full = [], 0, 0
    for row in changed.nonzero().flatten().tolist():
        start, ends = 0, (tokens[row] == text.corpus.end).nonzero().flatten().tolist()
        for end in ends:
            asked, answer = tokens[row, start : end + 1], labels[row, start : end + 1]
            prompt = questions.spell(asked[answer == NOT_SCORED])
            assert questions.spell(answer[answer != NOT_SCORED]) == f" {read(prompt)[0]}{END}"
            start = end + 1
        assert torch.equal(tokens[row, start:], plain[row, start:]) and (labels[row, start:] != NOT_SCORED).all()
        assert 400 - start < questions.lengths[0]  # no question fits any more
        firsts.append(ends[0])
        count, full = count + len(ends), full + (start == 400)
    assert max(firsts) > 350 and min(firsts) < 200 and count > 1.5 * len(firsts)
    [batch] = draw_batches(mixture, 200, 400, torch.Generator().manual_seed(0))
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) == 201 + count - full
    assert batch.labels[0, batch.cu_seqlens[:-1].long()].eq(NOT_SCORED).all()


def test_mixtures_of_any_two_tasks() -> None:
    one, other = MQRAR(keys=4), MQRAR(keys=4, back=2)
    tokens, labels = Mixture(one, other, 1.0).sample(20, 60, torch.Generator().manual_seed(0))
    plain, _ = one.sample(20, 60, torch.Generator().manual_seed(0))
    for row, scored, before in zip(tokens.tolist(), labels.tolist(), plain.tolist(), strict=True):
        differing = [place for place in range(60) if row[place] != before[place]]
        values: dict[int, list[int]] = {}
        for place in range(0, differing[-1], 2):  # at least these pairs are of the other task
            if row[place + 1] == 0:
                assert scored[place + 1] == values[row[place]][-2]
            else:
                values.setdefault(row[place], []).append(row[place + 1])
        assert differing[-1] > 40
    nothing = Mixture(one, other, 0.0).sample(20, 60, torch.Generator().manual_seed(0))
    assert torch.equal(nothing[0], plain)
    with pytest.raises(ValueError, match="share: expected 0 to 1, got 2"):
        Mixture(one, other, 2)
    with pytest.raises(ValueError, match=r"questions: expected lengths in tokens, at most 82 here, got \d+ tokens"):
        Mixture(Copy(), Addition(), 1.0).sample(20, 40, torch.Generator().manual_seed(0))


def test_mixtures_that_cannot_be(tmp_path: Path, tasks: dict[str, LongTask], tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the sea was calm and the wind had gone " * 200)
    text = Language(load_corpus(tmp_path / "a.txt", tokenizer=tokenizer, cache=tmp_path))
    questions = Questions({"vt": tasks["vt"]}, tokenizer)
    with pytest.raises(ValueError, match=r"length: expected \d+ tokens or more, the shortest question's, got 64"):
        Mixture(text, questions, 1.0).sample(4, 64, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"questions: expected as many tokens as the text has, 64, got \d+"):
        Mixture(Copy(), questions)
