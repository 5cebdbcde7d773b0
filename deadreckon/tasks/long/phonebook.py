"""PhoneBook: look up a person's number in a list where any entry may be asked for.

    Nora Becker: 7351942680
    Ivan Shah: 9120457713
    Edith Moreau: 6847720195
    …
    Ravi Costa: 8013364529

    Nora Becker: 7351942680
    Ravi Costa: 8013364529

    Ivan Shah:                                                                               -> 9120457713

Two entries are repeated as examples, then a name. The size is the number of entries. Correct if the first line of the
answer is the number. (Jelassi et al. 2024; names are from our own list, without repetition.)
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from deadreckon.tasks.long.question import Question
from deadreckon.tasks.long.words import count_names, draw_name


@dataclass(frozen=True)
class PhoneBook:
    """The task."""

    new_tokens: int = 24
    least: int = 3

    @property
    def most(self) -> int:
        """Half of all names, so that drawing a new one does not take long."""
        return count_names() // 2

    def ask(self, number: int, length: int, size: int, random: Random) -> Question:
        """Entries in random order, two of them repeated, and the name of a third."""
        book: dict[str, int] = {}
        while len(book) < size:
            book.setdefault(draw_name(random), random.randint(6_000_000_000, 9_999_999_999))
        entries = [f"{name}: {phone}" for name, phone in book.items()]
        entry, *shots = entries[:3]
        random.shuffle(entries)
        asked, phone = entry.split(": ")
        prompt = "\n".join([*entries, "", *shots, "", f"{asked}:"])
        return Question(prompt, f" {phone}", (phone,), depth=entries.index(entry) / (size - 1))

    def score(self, question: Question, said: str) -> float:
        """1 if the first line is the number."""
        return float(said.strip().split("\n")[0].strip() == question.references[0])
