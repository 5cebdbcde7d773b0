"""The long-context suite: questions about long texts, answered by generation. One task per file; see `question`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from deadreckon.tasks.long.babilong import read_babilong
from deadreckon.tasks.long.common_words import CommonWords
from deadreckon.tasks.long.frequent_words import FrequentWords
from deadreckon.tasks.long.niah_multikey import NiahMultikey
from deadreckon.tasks.long.niah_single import NiahSingle
from deadreckon.tasks.long.passkey import Passkey
from deadreckon.tasks.long.phonebook import PhoneBook
from deadreckon.tasks.long.question import LongTask
from deadreckon.tasks.long.variable_tracking import VariableTracking

LONG_TASKS: dict[str, Callable[[], LongTask]] = {
    "passkey": Passkey,
    "niah-single": NiahSingle,
    "niah-multikey": NiahMultikey,
    "niah-multikey-uuids": partial(NiahMultikey, uuids=True),
    "vt": VariableTracking,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "phonebook": PhoneBook,
}
BABILONG = tuple(f"babilong-qa{number}" for number in range(1, 6))


def make_long_tasks(
    names: Sequence[str] = (), *, babi: str = "", books: str = "", part: str = "test"
) -> dict[str, LongTask]:
    """Tasks of the suite by name; by default all, without BABILong if its data is not given.

    Args:
        names: of `LONG_TASKS` and `BABILONG`; "babilong" for all of the latter.
        babi: bAbI's facts and questions, see :func:`deadreckon.tasks.long.babilong.read_babilong`.
        books: background texts for BABILong.
        part: split of bAbI's stories and of the books: "test" or "train".
    """
    if bool(babi) != bool(books):
        raise ValueError(f"babi, books: expected both or none, got babi={babi!r}, books={books!r}")
    offered = (*LONG_TASKS, *BABILONG)
    wanted = [one for name in names for one in (BABILONG if name == "babilong" else (name,))]
    if unknown := [name for name in wanted if name not in offered]:
        raise ValueError(f"tasks: expected some of {', '.join(offered)}; got {unknown[0]!r}")
    if not babi and (needy := [name for name in wanted if name in BABILONG]):
        raise ValueError(f"babi, books: expected files for {needy[0]}, got none")
    wanted = wanted or [*LONG_TASKS, *(BABILONG if babi else ())]
    read = read_babilong(babi, books, part) if any(name in BABILONG for name in wanted) else {}
    if absent := [name for name in wanted if name in BABILONG and name.removeprefix("babilong-") not in read]:
        raise ValueError(
            f"babi: expected a line for {absent[0].removeprefix('babilong-')} in {babi}, got {', '.join(read)}"
        )
    return {name: LONG_TASKS[name]() if name in LONG_TASKS else read[name.removeprefix("babilong-")] for name in wanted}
