"""What a captured CUDA graph depends on: addresses of weights, active adapters, autocast, and the absence of hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 16  # one module in so many is checked in every step


def hooked(parts: Iterable[nn.Module]) -> bool:
    """Whether modules have forward hooks, or accelerate's, which a CUDA graph would skip."""
    return any(part._forward_hooks or part._forward_pre_hooks or "_hf_hook" in vars(part) for part in parts)


def addresses(held: Iterable[Tensor | None]) -> Iterator[int]:
    """Data pointers of tensors; of wrapper subclasses, such as quantised weights, those of their inner tensors."""
    for x in held:
        if x is not None and type(x) is not nn.Parameter and is_traceable_wrapper_subclass(x):
            yield from addresses(getattr(x, name) for name in x.__tensor_flatten__()[0])
        elif x is not None:
            yield x.data_ptr()


def is_adapted(part: nn.Module) -> bool:
    """Whether PEFT has wrapped a module. (Whole models have methods of these names.)"""
    return isinstance(getattr(type(part), "active_adapters", None), property)


def adapters_of(part: Any) -> tuple[Any, ...]:
    """The adapters' settings in a module that PEFT has wrapped: they change without any change of weights."""
    merged, scaling = getattr(part, "merged_adapters", ()), getattr(part, "scaling", None)
    return tuple(part.active_adapters), part.disable_adapters, tuple(merged), repr(scaling)


class Surroundings(NamedTuple):
    """What a captured step depends on, of the model and of its caller."""

    weights: tuple[int, ...]  # data pointers
    adapters: tuple[Any, ...]
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, parts: Iterable[nn.Module], kind: str) -> Surroundings:
        """The current values, for these modules and this type of device."""
        weights, adapters = list[int](), list[Any]()
        for part in parts:
            weights += addresses(part._parameters.values())
            weights += addresses(part._buffers.values())
            if is_adapted(part):
                adapters.append(adapters_of(part))
        return cls(tuple(weights), tuple(adapters), (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))


class Watch:
    """Checks before every step whether its surroundings have changed: on a sample, which takes some microseconds.

    All modules are checked when a new sequence begins. In the middle of a sequence, a change that the sample misses has
    no effect until then.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        parts = list(model.modules())
        self.kind, self.hooks = kind, [x for part in parts for x in (part._forward_hooks, part._forward_pre_hooks)]
        adapted = [part for part in parts if is_adapted(part)]
        self.sample = [part for part in parts if part._parameters][::SAMPLED] + adapted[:1]
        self.expected = Surroundings.of(self.sample, kind)

    def fine(self) -> bool:
        """Whether the sample is unchanged, and there are no hooks."""
        return not any(self.hooks) and Surroundings.of(self.sample, self.kind) == self.expected
