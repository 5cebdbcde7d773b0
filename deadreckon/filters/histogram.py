"""Histogram filters: the distribution over a cursor's positions, updated token by token (PRISM, Algorithm 1)."""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor

from deadreckon.filters.chunked import advance, retreat, work_type
from deadreckon.filters.operators import filter_operator, superposition_operator
from deadreckon.filters.reference import filter_reference
from deadreckon.ops.checks import check_derivatives, check_tensor, shape_of
from deadreckon.ops.tracing import without_autocast
from deadreckon.ops.triton import HAS_TRITON

Implementation = Literal["auto", "reference", "blockwise", "native", "triton"]

filter_blockwise = filter_operator("deadreckon::histogram_filter_blockwise", advance, retreat)
superpose_blockwise = superposition_operator("deadreckon::superpose_blockwise", advance, retreat)


def histogram_filter(
    reset: Tensor,
    move: Tensor,
    gamma: Tensor,
    *,
    positions: int,
    copy: Tensor | None = None,
    initial: Tensor | None = None,
    eps: float = 1e-8,
    impl: Implementation = "auto",
) -> Tensor:
    """Moves a distribution h over P positions at every token, and sharpens it. With total = Σ h,

        new[i]               +=  h[i] · (1 − reset) · stay
        new[min(i + 1, P−1)] +=  h[i] · (1 − reset) · up          new[1] += total · reset · up
        new[max(i − 1, 0)]   +=  h[i] · (1 − reset) · down        new[0] += total · reset · (down + stay)
        new  ←  new · copy[P] + total · copy[:P]                  if there is copy
        h    ←  (new + ε)^γ / Σ (new + ε)^γ

    Args:
        reset: (B, T, C) probabilities that a cursor starts again at 0.
        move: (B, T, C, 3) probabilities of up (+1), down (−1) and stay.
        gamma: (C,) exponents, one per cursor; above 1 they sharpen.
        positions: P, 2 or more.
        copy: (B, T, C, P + 1) probabilities of a jump to each position; the last is that of no jump.
        initial: (B, C, P) histograms before the first token; by default all mass is at 0. To continue a sequence, pass
            the histograms after the last token of the previous piece.
        eps: ε, from 1e-30 to 1.
        impl: ``"reference"`` (the literal definition, differentiated by autograd), ``"blockwise"`` (PyTorch),
            ``"native"`` (C for CPUs, compiled on first use), ``"triton"`` (kernels for CUDA devices; 16 and 32 bits, at
            most 4096 positions), or ``"auto"``: the kernels where they support the inputs, on a CPU with a C compiler
            ``"native"``, else ``"blockwise"``. They differ by rounding alone.

    Returns:
        (B, T, C, P) histograms after each token, in the dtype of reset; computed in float32 (float64 if reset is).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_gates(reset, move, gamma, positions, copy, initial, eps)
    state = _state(reset, positions, initial)
    chosen, _ = _pick(impl, positions, reset, move, gamma, copy, state)
    with without_autocast(reset):
        return chosen(reset, move, gamma, copy, state, float(eps))


@overload
def superpose(
    reset: Tensor, move: Tensor, gamma: Tensor, table: Tensor, *, copy: Tensor | None = None,
    initial: Tensor | None = None, eps: float = 1e-8, final: Literal[False] = False, impl: Implementation = "auto",
) -> Tensor: ...  # fmt: skip
@overload
def superpose(
    reset: Tensor, move: Tensor, gamma: Tensor, table: Tensor, *, copy: Tensor | None = None,
    initial: Tensor | None = None, eps: float = 1e-8, final: Literal[True], impl: Implementation = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def superpose(
    reset: Tensor,
    move: Tensor,
    gamma: Tensor,
    table: Tensor,
    *,
    copy: Tensor | None = None,
    initial: Tensor | None = None,
    eps: float = 1e-8,
    final: bool = False,
    impl: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Superpositions e_t = Σ_k h_t[k] · table[k] of a filter's histograms, which are never all in memory at once.

    Args:
        table: (P, d) encodings of the positions. Products and the result have its dtype; it gets no gradient.
        final: whether to also return the last histograms, the next piece's `initial`.
        reset, move, gamma, copy, initial, eps, impl: as for :func:`histogram_filter`.

    Returns:
        (B, T, C, d) in the dtype of table; with `final` also (B, C, P) in float32 (float64 if reset is).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_tensor("reset", reset)
    check_tensor("table", table, reset, "reset")
    if table.dim() != 2 or table.shape[0] < 2 or table.shape[1] < 1:
        raise ValueError(f"table: expected (P, d) with P of 2 or more, got {shape_of(table)}")
    if table.requires_grad:
        raise ValueError("table: expected a tensor that does not require a gradient, which superpose does not compute")
    positions = table.shape[0]
    _check_gates(reset, move, gamma, positions, copy, initial, eps)
    state = _state(reset, positions, initial)
    _, chosen = _pick(impl, positions, reset, move, gamma, copy, state)
    with without_autocast(reset):
        e, last = chosen(reset, move, gamma, copy, state, table, float(eps))
    return (e, last) if final else e


def filter_next(
    actions: Tensor, sharpness: Tensor, copy: Tensor | None, kept: Tensor, places: Tensor, dtype: torch.dtype,
    eps: float = 1e-8,
) -> Tensor:  # fmt: skip
    """One decoding step in one kernel: histograms (B, C, P), in a dtype. See `deadreckon/filters/triton.py`.

    Args:
        actions: (B, 1, C, 4) logits of gates; γ = 1 + exp(sharpness (C,)); copy as above, of the last cursors alone.
        kept: (B, K, C, P) ring buffer of histograms, indexed by position modulo K; read and written in place.
        places: (B or 1, 1) the token's position.
    """
    from deadreckon.filters.triton import step

    return step(actions, sharpness, copy, kept, places, dtype, eps)


def _superpose_reference(
    reset: Tensor, move: Tensor, gamma: Tensor, copy: Tensor | None, initial: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    h = filter_reference(reset, move, gamma, copy, initial, eps)
    return h.to(table.dtype) @ table, h[:, -1].to(work_type(reset))


def _pick(
    impl: object, positions: int, reset: Tensor, *others: Tensor | None
) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """The implementations of filter and superposition for these inputs."""
    if impl == "reference":
        return filter_reference, _superpose_reference
    check_derivatives(impl, (reset, *others))
    if impl == "triton" or (impl == "auto" and reset.is_cuda):
        reason = _reason_against_kernels(reset, positions)
        if reason is None:
            from deadreckon.filters.triton import filter_fused, superpose_fused

            return filter_fused, superpose_fused
        if impl == "triton":
            raise ValueError(f"impl: 'triton' needs {reason}")
    if impl == "native" or (impl == "auto" and reset.is_cpu):
        reason = _reason_against_native(reset)
        if reason is None:
            from deadreckon.filters.native import filter_native, superpose_native

            return filter_native, superpose_native
        if impl == "native":
            raise ValueError(f"impl: 'native' needs {reason}")
    if impl in ("auto", "blockwise"):
        return filter_blockwise, superpose_blockwise
    raise ValueError(f"impl: expected 'auto', 'reference', 'blockwise', 'native' or 'triton', got {impl!r}")


def _reason_against_kernels(reset: Tensor, positions: int) -> str | None:
    """What the Triton kernels need and these inputs lack, or None. Triton is not imported before this."""
    if not reset.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on a CUDA device (or TRITON_INTERPRET=1), got {reset.device}"
    if not HAS_TRITON:
        return "the package triton, which is not installed"
    from deadreckon.filters.triton import reason_against

    return reason_against(reset, positions)


def _reason_against_native(reset: Tensor) -> str | None:
    """What the C functions need and these inputs lack, or None. They are not compiled before this."""
    if not reset.is_cpu:
        return f"tensors on a CPU, got {reset.device}"
    from deadreckon.filters.native import reason_against

    return reason_against(reset.dtype)


def _state(reset: Tensor, positions: int, initial: Tensor | None) -> Tensor:
    """initial, or all mass at 0."""
    if initial is not None:
        return initial
    origin = torch.zeros(positions, dtype=work_type(reset), device=reset.device)
    origin[:1].fill_(1)
    return origin.expand(reset.shape[0], reset.shape[2], -1)


def _check_gates(
    reset: Tensor, move: Tensor, gamma: Tensor, positions: object, copy: Tensor | None, initial: Tensor | None,
    eps: object,
) -> None:  # fmt: skip
    check_tensor("reset", reset)
    if reset.dim() != 3 or 0 in reset.shape:
        raise ValueError(f"reset: expected (B, T, C), each 1 or more, got {shape_of(reset)}")
    if isinstance(positions, bool) or not isinstance(positions, int) or positions < 2:
        raise ValueError(f"positions: expected an integer of 2 or more, got {positions!r}")
    batch, length, cursors = reset.shape
    expected: dict[str, tuple[Tensor | None, str, tuple[int, ...]]] = {
        "move": (move, "(B, T, C, 3)", (batch, length, cursors, 3)),
        "gamma": (gamma, "(C,)", (cursors,)),
        "copy": (copy, "(B, T, C, P + 1)", (batch, length, cursors, positions + 1)),
        "initial": (initial, "(B, C, P)", (batch, cursors, positions)),
    }
    for name, (x, letters, shape) in expected.items():
        if x is None and name in ("copy", "initial"):
            continue
        check_tensor(name, x, reset, "reset")
        assert x is not None
        if x.shape != shape:
            raise ValueError(f"{name}: expected {letters} = {shape}, got {shape_of(x)}")
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 1e-30 <= float(eps) <= 1:
        raise ValueError(f"eps: expected a number from 1e-30 to 1, got {eps!r}")
