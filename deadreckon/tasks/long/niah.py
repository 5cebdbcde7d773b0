"""RULER's needles in a haystack: sentences that give a key a value, and the prompt that asks for it."""

from __future__ import annotations

from deadreckon.tasks.long.question import Question

NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
TEMPLATE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key} mentioned in the provided text? The "
    "special magic {kind} for {key} mentioned in the provided text is"
)
NEW_TOKENS = 128


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that gives the key its value."""
    return NEEDLE.format(kind=kind, key=key, value=value)


def question(kind: str, key: str, value: str, lines: list[str]) -> Question:
    """The question about a key, after lines of which one is its needle."""
    place = lines.index(needle(kind, key, value))
    prompt = TEMPLATE.format(kind=kind, key=key, context="\n".join(lines))
    return Question(prompt, f" {value}.", (value,), depth=place / max(len(lines) - 1, 1))
