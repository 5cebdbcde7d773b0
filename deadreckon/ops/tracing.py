"""What tracers need: `torch.compile`, `torch.export`, FakeTensorMode and tensors on the meta device.

Whatever looks at data, loops over tokens or writes in place is an operator of torch, which tracers do not look into.
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
) -> Callable[..., Any]:
    """An operator ``namespace::name`` from a function with annotations, which must not change or return its inputs.

    As ``torch.library.custom_op``, whose first call however imports the compiler, which takes a second or more.

    Args:
        fake: as the implementation, of tensors without data: returns empty ones, contiguous.
        gradients: (ctx, gradients of outputs) -> gradients of inputs; itself made of operators that can be traced. It
            has no derivatives of its own, which is said to whoever wants some.
        save: (ctx, inputs, output) -> None, what it needs.
    """
    schema = torch.library.infer_schema(implementation, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)
    if gradients is not None:

        def first(ctx: Any, *grads: Any) -> Any:
            first_derivatives_only()
            return gradients(ctx, *grads)

        torch.library.register_autograd(name, first, setup_context=save)
    namespace, _, local = name.partition("::")
    return getattr(getattr(torch.ops, namespace), local).default


def first_derivatives_only(instead: str = "impl='reference'") -> None:
    """For backward passes: nobody has written down their derivatives."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives need {instead}; this computes first derivatives")


def room_like(*inputs: Tensor | None) -> list[Tensor]:
    """Room for a gradient of each that there is, contiguous."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs if x is not None]


def traced(x: Tensor) -> bool:
    """Whether x has no data to look at: it is being traced, or on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A region where operations on x's device keep their dtype. The meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear map reads x."""
    if x.dtype != torch.float32 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def cast_once(x: Tensor) -> Tensor:
    """x as autocast hands it to a linear map: each map that reads x would cast it anew, and keep its own copy."""
    return x.to(autocast_dtype(x))
