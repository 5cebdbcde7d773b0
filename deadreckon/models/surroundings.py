"""What a captured decoding step takes for granted: where weights are, which adapters are active, autocast, no hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 16  # one module in so many is looked at in every step


def hooked(parts: Iterable[nn.Module]) -> bool:
    """Whether calls of Python belong to a step, which a graph would leave out."""
    return any(part._forward_hooks or part._forward_pre_hooks or "_hf_hook" in vars(part) for part in parts)


def addresses(held: Iterable[Tensor | None]) -> Iterator[int]:
    """Where tensors are, and the parts of those that are made of others, as quantised ones are."""
    for x in held:
        if x is not None and type(x) is not nn.Parameter and is_traceable_wrapper_subclass(x):
            yield from addresses(getattr(x, name) for name in x.__tensor_flatten__()[0])
        elif x is not None:
            yield x.data_ptr()


def is_adapted(part: nn.Module) -> bool:
    """Whether PEFT has wrapped a module. (Whole models have methods of these names.)"""
    return isinstance(getattr(type(part), "active_adapters", None), property)


def adapters_of(part: Any) -> tuple[Any, ...]:
    """Which adapters take part in a wrapped module, and how: that changes by flags alone."""
    merged, scaling = getattr(part, "merged_adapters", ()), getattr(part, "scaling", None)
    return tuple(part.active_adapters), part.disable_adapters, tuple(merged), repr(scaling)


class Surroundings(NamedTuple):
    """What a captured step takes for granted, of a model and of its caller."""

    weights: tuple[int, ...]  # where they are
    adapters: tuple[Any, ...]
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, parts: Iterable[nn.Module], kind: str) -> Surroundings:
        """As it is now, of these modules on this kind of device."""
        weights, adapters = list[int](), list[Any]()
        for part in parts:
            weights += addresses(part._parameters.values())
            weights += addresses(part._buffers.values())
            if is_adapted(part):
                adapters.append(adapters_of(part))
        return cls(tuple(weights), tuple(adapters), (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))


class Watch:
    """Looks at every step whether its surroundings are what they were: at a sample, which takes some microseconds.

    A new sequence asks for all of them: one that is under way goes on with what it began with where the sample shows no
    change.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        parts = list(model.modules())
        self.kind, self.hooks = kind, [x for part in parts for x in (part._forward_hooks, part._forward_pre_hooks)]
        adapted = [part for part in parts if is_adapted(part)]
        self.sample = [part for part in parts if part._parameters][::SAMPLED] + adapted[:1]
        self.expected = Surroundings.of(self.sample, kind)

    def fine(self) -> bool:
        """Whether nothing has changed, and nobody listens."""
        return not any(self.hooks) and Surroundings.of(self.sample, self.kind) == self.expected
