"""Custom ops and helpers for tracers: `torch.compile`, `torch.export`, FakeTensorMode and the meta device.

Whatever reads data, loops over tokens or writes in place is a custom op, which is opaque to tracers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def operator(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    instead: str = "impl='reference'",
) -> Callable[..., Any]:
    """Registers a custom op ``namespace::name`` from an annotated function that neither mutates nor returns its inputs.

    Like ``torch.library.custom_op``, whose first call however imports the compiler, which takes a second or more.

    Args:
        fake: the fake implementation, for tensors without data: returns empty contiguous ones.
        gradients: (ctx, gradients of outputs) -> gradients of inputs; itself made of traceable operators. Raises if
            its own derivatives are asked for.
        save: (ctx, inputs, output) -> None, saves what `gradients` needs.
        instead: what has second derivatives.
    """
    schema = torch.library.infer_schema(implementation, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)
    if gradients is not None:

        def first(ctx: Any, *grads: Any) -> Any:
            first_derivatives_only(instead)
            return gradients(ctx, *grads)

        torch.library.register_autograd(name, first, setup_context=save)
    namespace, _, local = name.partition("::")
    return getattr(getattr(torch.ops, namespace), local).default


def first_derivatives_only(instead: str = "impl='reference'") -> None:
    """Raises in a backward pass that is itself to be differentiated (create_graph): this is not implemented."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives need {instead}; this computes first derivatives")


def room_like(*inputs: Tensor | None) -> list[Tensor]:
    """An empty contiguous tensor for the gradient of each input that is not None."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs if x is not None]


def traced(x: Tensor) -> bool:
    """Whether x has no data to read: it is being traced, or on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A region where operations on x's device keep their dtype. The meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear map reads x, under autocast or not."""
    if x.dtype != torch.float32 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def cast_once(x: Tensor) -> Tensor:
    """x as autocast casts it for a linear map; otherwise each map that reads x would cast it and save its own copy."""
    return x.to(autocast_dtype(x))
