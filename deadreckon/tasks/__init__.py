"""Tasks with answers that can be scored at any length. One task per file; the interface is in `task`."""

from __future__ import annotations

from deadreckon.tasks.a5 import A5Identity, A5Products
from deadreckon.tasks.addition import Addition
from deadreckon.tasks.copy import Copy
from deadreckon.tasks.dynamic_copy import DynamicCopy
from deadreckon.tasks.flipflop import FlipFlop
from deadreckon.tasks.mqrar import MQRAR
from deadreckon.tasks.multiplication import Multiplication
from deadreckon.tasks.odds_first import OddsFirst
from deadreckon.tasks.reverse import Reverse
from deadreckon.tasks.scan import Scan
from deadreckon.tasks.stack import Stack
from deadreckon.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "flip-flop": FlipFlop,
    "addition": Addition,
    "copy": Copy,
    "reverse": Reverse,
    "odds-first": OddsFirst,
    "stack": Stack,
    "scan": Scan,
    "dynamic-copy": DynamicCopy,
    "multiplication": Multiplication,
    "a5-products": A5Products,
    "a5-identity": A5Identity,
    "mqrar": MQRAR,
}
