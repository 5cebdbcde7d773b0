"""Reference solvers for the long-context suite: they answer a prompt from its text, independently of the tasks."""

from __future__ import annotations

import re
from collections import Counter

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for (\S+) is: (\S+)\.")


def read_passkey(prompt: str) -> list[str]:
    [(key, again)] = re.findall(r"The pass key is (\d{5})\. Remember it\. (\d{5}) is the pass key\.", prompt)
    assert key == again and prompt.endswith("\nWhat is the pass key? The pass key is")
    return [key]


def read_niah(prompt: str) -> list[str]:
    [asked] = re.findall(r"What is the special magic \w+ for (\S+) mentioned", prompt)
    found = NEEDLE.findall(prompt)
    assert len(dict(found)) == len(found)
    return [dict(found)[asked]]


def read_vt(prompt: str) -> list[str]:
    example, rest = prompt.split("Memorize and track")[1:]
    lists = []
    for text in (example, rest):
        values: dict[str, str] = {}
        for name, value in re.findall(r"\bVAR (\w+) = (?:VAR )?(\w+)", text):
            values[name] = values.get(value, value)
        [wanted] = re.findall(r"assigned the value (\d+) in the text above", text)
        lists.append([name for name, value in values.items() if value == wanted])
    assert example.endswith(", they are:  " + " ".join(lists[0]) + "\n\n\n\n") and rest.endswith(", they are: ")
    return lists[1]


def read_cwe(prompt: str) -> list[str]:
    lists = []
    for text in prompt.split("Below is a numbered list of words")[1:]:
        counts = Counter(re.findall(r"\d+\. ([a-z]+)", text.split("\n")[1])).most_common()
        assert counts[9][1] > counts[10][1]
        lists.append([word for word, _ in counts[:10]])
    [answer] = re.findall(r"in the list are:((?: \d+\. \w+)+)", prompt)
    assert sorted(re.findall(r"[a-z]+", answer)) == sorted(lists[0])
    return lists[1]


def read_fwe(prompt: str) -> list[str]:
    text = prompt.split("coded words. ")[1].split("\nQuestion:")[0]
    counts = Counter(word for word in text.split() if word != "...").most_common()
    assert counts[2][1] > counts[3][1]
    return [word for word, _ in counts[:3]]


def read_phonebook(prompt: str) -> list[str]:
    book, shots, asked = prompt.split("\n\n")
    entries = dict(line.split(": ") for line in book.split("\n"))
    assert len(entries) == len(book.split("\n"))
    assert all(entries[name] == phone for name, phone in (line.split(": ") for line in shots.split("\n")))
    assert asked.removesuffix(":") not in shots
    return [entries[asked.removesuffix(":")]]


def read_babilong(prompt: str) -> list[str]:
    """qa1: where somebody went last."""
    *_, text = prompt.split("\n\nText: ")
    [who] = re.findall(r"Question: Where is (\w+)\?\nAnswer:$", text)
    return [re.findall(rf"{who} went to the (\w+)\.", text)[-1]]


READERS = {
    "passkey": read_passkey,
    "niah-single": read_niah,
    "niah-multikey": read_niah,
    "niah-multikey-uuids": read_niah,
    "vt": read_vt,
    "cwe": read_cwe,
    "fwe": read_fwe,
    "phonebook": read_phonebook,
    "babilong-qa1": read_babilong,
}


def read(prompt: str) -> list[str]:
    """Answers a prompt of any task."""
    beginnings = {
        "There is an important": read_passkey, "A special magic": read_niah, "Memorize": read_vt,
        "Below is": read_cwe, "Read the following": read_fwe, "Facts about": read_babilong,
    }  # fmt: skip
    return next((reader for start, reader in beginnings.items() if prompt.startswith(start)), read_phonebook)(prompt)
