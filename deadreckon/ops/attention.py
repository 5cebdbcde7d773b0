"""Public operations `attend` and `attend_next`: validate arguments, pick an implementation, run it."""

from __future__ import annotations

import os
import weakref
from numbers import Real
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from deadreckon.ops.blockwise.attend import attend_blockwise
from deadreckon.ops.blockwise.documents import boundaries, separated, sound
from deadreckon.ops.checks import check_derivatives, check_tensor, is_differentiated, shape_of
from deadreckon.ops.factors import Factors, Householder, Power, Rotation, Score, Transport
from deadreckon.ops.layout import sent
from deadreckon.ops.reference import attend_reference
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.stream import PYTORCH, Kernels, attend_stream
from deadreckon.ops.tracing import traced, without_autocast
from deadreckon.ops.triton import HAS_TRITON

if TYPE_CHECKING:
    from deadreckon.ops.parallel.context import ContextParallel

Implementation = Literal["auto", "reference", "blockwise", "triton"]

IMPLEMENTATIONS = {
    "reference": "the literal O(T²) definition, any device and dtype; what everything else is tested against",
    "blockwise": "plain PyTorch over stock attention kernels, any device and dtype, memory linear in T",
    "triton": "fused kernels for CUDA: softmax with any transport and gate, sticks, even powers; 16 and 32 bits",
}
"""Name -> what it is. ``auto`` picks ``triton`` on CUDA where it serves, else ``blockwise``."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transport: Transport | None = None,
    log_gate: Tensor | None = None,
    score: Score = "softmax",
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    impl: Implementation = "auto",
    cp: ContextParallel | None = None,
) -> Tensor:
    """Causal attention with data-dependent position encodings.

        o_i = (1/Z_i) Σ_{j≤i} κ(scale · k_jᵀ T_ji q_i) · Π_{s=j+1..i} f_s · U_ji v_j

    Args:
        q: (B, T, Hq, D) queries; Hq a multiple of H (query head h reads key head h // (Hq / H)).
        k: (B, T, H, D) keys.
        v: (B, T, H, E) values; E may differ from D.
        transport: T, what a route does to a key: ``None``, :class:`Rotation` (and U, with ``values=True``),
            :class:`Householder`, or both, ``(Rotation(…), Householder(…))``: T_ji = Π_{s=j+1..i} R_s H_s, with angles
            of 1 or H heads; U is the rotation alone.
        log_gate: log f ≤ 0, added after scaling: (B, T, Hq) or (B, T, H) per token, or (Hq,) or (H,) constants.
            With stick-breaking the gate multiplies the finished weight. Values below −1e4, −inf included, are clamped.
        score: κ and Z: ``"softmax"``, ``"stick-breaking"`` (σ, no Z, no attention to itself) or :class:`Power`.
        scale: factor of the logits, ``D ** -0.5`` by default.
        cu_seqlens: (N + 1,) integer boundaries of packed sequences, as in FlashAttention; needs B = 1. With cp, and
            when compiled without kernels, documents may be separated by a log gate of −1e4: for logits up to 10 000.
        impl: ``"reference"`` (the O(T²) definition), ``"blockwise"`` (PyTorch, memory linear in T), ``"triton"``
            (kernels for CUDA devices: softmax with any transport and gate, stick-breaking without Householder steps or
            gates; D and E multiples of 8 up to 256, with Householder steps up to 128 (float32: 64), with gates or
            packed in float32 up to 128; softmax without transport in 16 bits also with D up to 512 and E up to 128;
            ``Power(2)`` and ``Power(4)`` without Householder steps, as attention or chunked, with D and E up to 128,
            ``Power(4)`` chunked with D up to 32; a ValueError for anything else), or ``"auto"``: the kernels where
            supported, else ``"blockwise"``. Forward-mode AD, ``torch.func`` derivatives and second derivatives need
            ``"reference"``.
        cp: context parallelism: q, k, v, every factor and the output are this rank's shard of T, as ``cp.shard``
            returns it; cu_seqlens are the boundaries of the full sequence. Gradients flow across ranks. Not with
            ``impl="reference"``.

    Returns:
        (B, T, Hq, E), in the dtype of q. A NaN or infinity at token t reaches outputs from t on, never an earlier one
        or one of another document. The exception are values (and angles that rotate them) without Householder steps,
        if unpacked or with stick-breaking or powers: in Triton kernels a non-finite one reaches up to 127 earlier
        outputs, those of the same tile and document. With plain softmax, on any device, PyTorch's own kernel (for wide
        keys, ours) does the same, within a tile of its choice.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_inputs(q, k, v)
    _check_transport(transport, q, k, v)
    gates = _check_gate(log_gate, q, k)
    if cp is not None and type(cp).__name__ != "ContextParallel":  # by name: not imported here
        raise ValueError(f"cp: expected a ContextParallel or None, got {type(cp).__name__}")
    documents = check_documents(cu_seqlens, q, cp)
    scale = _check_scale(scale, q)
    factors = Factors(transport, gates, score)
    _check_score(factors)
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl: expected 'auto', 'reference', 'blockwise' or 'triton', got {impl!r}")
    plain = factors.parts()[1] is None and gates is None and score == "softmax"  # PyTorch's own attention, on a CPU
    if impl != "reference" and (impl == "triton" or q.is_cuda or not plain):
        check_derivatives(impl, _inputs(q, k, v, factors).values())
    if cp is not None and cp.size > 1:
        return _attend_shards(q, k, v, factors, scale, cu_seqlens if documents is None else documents, impl, cp)
    # Autocast would run the sums of phases, gates and frames in half precision.
    with without_autocast(q):
        if impl == "triton" or (impl == "auto" and q.is_cuda):
            reason = _reason_against_kernels(q, v, factors, packed=cu_seqlens is not None)
            if reason is None:
                from deadreckon.ops.triton.attend import attend_fused

                if cu_seqlens is not None and score == "softmax":  # other scores read and validate them on the host
                    if documents is None:
                        cu_seqlens = sound(cu_seqlens.to(q.device), q.shape[1])
                    elif cu_seqlens.device != q.device:
                        cu_seqlens = sent(documents, q.device, cu_seqlens.dtype)
                return attend_fused(q, k, v, factors, scale, cu_seqlens, documents)
            if impl == "triton":
                raise ValueError(f"impl: 'triton' needs {reason}")
        if cu_seqlens is not None and documents is None:
            factors = factors._replace(log_gate=separated(gates, cu_seqlens, k))
        attend_plainly = attend_reference if impl == "reference" else attend_blockwise
        return attend_plainly(q, k, v, factors, scale, documents)


def _attend_shards(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, documents: list[int] | Tensor | None,
    impl: Implementation, cp: ContextParallel,
) -> Tensor:  # fmt: skip
    from deadreckon.ops.parallel.attend import attend_parallel

    if impl == "reference":
        raise ValueError("impl: expected 'auto', 'blockwise' or 'triton' beside cp, got 'reference'")
    with without_autocast(q):
        kernels = False
        if impl == "triton" or (impl == "auto" and q.is_cuda):
            reason = _reason_against_kernels(q, v, factors, packed=documents is not None)
            if reason is not None and impl == "triton":
                raise ValueError(f"impl: 'triton' needs {reason}")
            kernels = reason is None
        return attend_parallel(q, k, v, factors, scale, documents, cp, kernels)


def _reason_against_kernels(
    q: Tensor, v: Tensor, factors: Factors, packed: bool, later_piece: bool = False
) -> str | None:
    """What the Triton kernels would need to run these inputs (or a piece after the first); None if they can.

    Imports Triton.
    """
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on a CUDA device (or TRITON_INTERPRET=1), got {q.device}"
    if not HAS_TRITON:
        return "the package triton, which is not installed"
    if later_piece:
        from deadreckon.ops.streaming.fused import reason_against_next

        return reason_against_next(q, v, factors)
    from deadreckon.ops.triton.attend import reason_against

    return reason_against(q, v, factors, packed)


@torch.no_grad()
def share_in_reach(q: Tensor, k: Tensor, log_gate: Tensor, *, scale: float | None = None) -> float:
    """The share of the causal triangle that Triton kernels compute under these forget gates; they skip the rest.

    What is skipped cannot affect the output at its precision: with these sums of log gates, no logit that the longest
    query and key of a head can produce is large enough. Sequences of fewer than 2048 tokens are computed in full all
    the same. On a CPU, where no kernel runs, it reports what one would skip.

    Args:
        q, k, log_gate, scale: as for :func:`attend`.
    """
    _check_inputs(q, k, k)
    gates = _check_gate(log_gate, q, k)
    if gates is None:
        raise ValueError("log_gate: expected a torch.Tensor, got None")
    if not HAS_TRITON:
        raise ValueError("share_in_reach: it is about Triton kernels, and the package triton is not installed")
    from deadreckon.ops.triton.gated.operator import share_in_reach as share

    return share(q, k, gates, _check_scale(scale, q))


def attend_next(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transport: Transport | None = None,
    log_gate: Tensor | None = None,
    score: Score = "softmax",
    scale: float | None = None,
    past: Past,
    impl: Implementation = "auto",
) -> Tensor:
    """:func:`attend` for the next piece of a sequence (prefill or decode), over the past and itself; updates the past.

    Any split of a sequence into pieces gives the same outputs. They carry no gradients: inputs that require gradients
    are rejected unless grad mode is off. After an exception, KeyboardInterrupt included, the past is unchanged.

    Args:
        q, k, v, transport, log_gate, score, scale: as for :func:`attend`, T being the length of the piece. All but T
            must match the preceding pieces: sizes, dtype, device, the kind of transport and its heads, gates or none
            and their heads, score and scale.
        past: the KV cache of the preceding pieces; ``Past()`` for the first.
        impl: ``"blockwise"`` (PyTorch), ``"triton"`` (kernels for the first piece as in :func:`attend`, for single
            tokens and, with Householder steps, for long pieces; other pieces use PyTorch's attention in any case; D up
            to 512 in half precision, with softmax and no transport) or ``"auto"``: the kernels on CUDA devices where
            supported, else ``"blockwise"``. ``"reference"`` does not stream.

    Returns:
        (B, T, Hq, E), in the dtype of q.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    _check_inputs(q, k, v)
    _check_transport(transport, q, k, v)
    factors = Factors(transport, _check_gate(log_gate, q, k), score)
    _check_score(factors)
    scale = _check_scale(scale, q)
    _check_no_gradients(q, k, v, factors)
    if not isinstance(past, Past):
        raise ValueError(f"past: expected a Past, got {type(past).__name__}")
    with torch.autocast(q.device.type, enabled=False):
        kernels = _streaming_kernels(q, v, factors, impl, first=not past.length)
        return attend_stream(q, k, v, factors, scale, past, kernels)


def _streaming_kernels(q: Tensor, v: Tensor, factors: Factors, impl: Implementation, first: bool) -> Kernels:
    """The operations that `attend_next` uses for the first or a later piece: PyTorch's or the Triton kernels'."""
    if impl not in ("auto", "blockwise", "triton"):
        raise ValueError(f"impl: expected 'auto', 'blockwise' or 'triton' for a piece of a sequence, got {impl!r}")
    if impl == "blockwise" or (impl == "auto" and not q.is_cuda):
        return PYTORCH
    reason = _reason_against_kernels(q, v, factors, packed=False, later_piece=not first)
    if reason is None:
        from deadreckon.ops.streaming.fused import STREAM

        return STREAM
    if impl == "triton":
        raise ValueError(f"impl: 'triton' needs {reason}")
    return PYTORCH


def _check_no_gradients(q: Tensor, k: Tensor, v: Tensor, factors: Factors) -> None:
    """Rejects inputs that require gradients in grad mode or have a tangent: both would be lost silently."""
    for name, x in _inputs(q, k, v, factors).items():
        if not isinstance(x, Tensor):
            continue
        if is_differentiated(x):
            raise ValueError(f"{name}: expected no forward-mode derivatives and none of torch.func, got some")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(f"{name}: expected no gradients to be required (or torch.no_grad()), got requires_grad")


def _inputs(q: Tensor, k: Tensor, v: Tensor, factors: Factors) -> dict[str, object]:
    """Every argument that may be a tensor, by name."""
    inputs: dict[str, object] = {"q": q, "k": k, "v": v, "log_gate": factors.log_gate}
    rotation, steps = factors.parts()  # field by field: torch 2.11 does not compile vars() of a dataclass
    if rotation is not None:
        inputs["transport.angles"] = rotation.angles
    if steps is not None:
        inputs |= {"transport.w": steps.w, "transport.beta": steps.beta}
    return inputs


def _check_scale(scale: float | None, q: Tensor) -> float:
    """Returns the scale, by default D^(−1/2)."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not abs(scale) <= 1e30:
        raise ValueError(f"scale: expected a finite number or None, got {scale!r}")
    return float(scale)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, None if name == "q" else q, "q")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, T, heads, channels), got shape {shape_of(x)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected q's dtype {q.dtype}, got {x.dtype}")
        if 0 in x.shape:
            raise ValueError(f"{name}: expected every dimension to be at least 1, got shape {shape_of(x)}")
    batch, length, query_heads, width = q.shape
    heads = k.shape[2]
    if k.shape != (batch, length, heads, width):
        new = " (new tokens over a KV cache are for attend_next)" if length < k.shape[1] else ""
        raise ValueError(
            f"k: expected (B, T, H, D) = ({batch}, {length}, H, {width}) to match q, got {shape_of(k)}{new}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected (B, T, H, E) = ({batch}, {length}, {heads}, E) to match k, got {shape_of(v)}")
    if query_heads % heads:
        raise ValueError(f"q: expected a multiple of k's {heads} heads, got {query_heads} query heads")


def _check_transport(transport: object, q: Tensor, k: Tensor, v: Tensor) -> None:
    match transport:
        case None:
            pass
        case Rotation():
            _check_rotation(transport, q, v, {1, k.shape[2], q.shape[2]})
        case Householder():
            _check_householder(transport, q, k)
        case (Rotation() as rotation, Householder() as steps) if isinstance(transport, tuple):
            # Angles for each query head would turn the one direction of a key head in several ways.
            _check_rotation(rotation, q, v, {1, k.shape[2]})
            _check_householder(steps, q, k)
        case _:
            kinds = [type(part).__name__ for part in transport] if isinstance(transport, tuple | list) else []
            came = f"a {type(transport).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")
            raise ValueError(
                f"transport: expected None, Rotation, Householder or a tuple (Rotation, Householder), got {came}"
            )


def _check_rotation(rotation: Rotation, q: Tensor, v: Tensor, heads: set[int]) -> None:
    """Checks a rotation; `heads` are the numbers of heads that its angles may have."""
    batch, length, _, width = q.shape
    angles = check_tensor("transport.angles", rotation.angles, q, "q")
    if width % 2:
        raise ValueError(f"transport: Rotation turns pairs of channels and needs an even D, got D = {width}")
    if (
        angles.dim() != 4
        or angles.shape[2] not in heads
        or angles.shape != (batch, length, angles.shape[2], width // 2)
    ):
        raise ValueError(
            f"transport.angles: expected (B, T, Hr, D/2) = ({batch}, {length}, Hr, {width // 2}) "
            f"with Hr in {sorted(heads)}, got {shape_of(angles)}"
        )
    if rotation.values and v.shape[3] != width:
        raise ValueError(f"transport.values: turning values needs E = D = {width}, got v with E = {v.shape[3]}")


def _check_householder(steps: Householder, q: Tensor, k: Tensor) -> None:
    w, beta = check_tensor("transport.w", steps.w, q, "q"), check_tensor("transport.beta", steps.beta, q, "q")
    if w.shape != k.shape:
        raise ValueError(f"transport.w: expected (B, T, H, D) = {shape_of(k)} to match k, got {shape_of(w)}")
    if beta.shape != k.shape[:3]:
        raise ValueError(f"transport.beta: expected (B, T, H) = {shape_of(k[..., 0])}, got {shape_of(beta)}")


def _check_gate(log_gate: object, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the gate as (B, T, H or Hq), constants expanded."""
    if log_gate is None:
        return None
    gate = check_tensor("log_gate", log_gate, q, "q")
    batch, length, query_heads, _ = q.shape
    heads = k.shape[2]
    if gate.dim() == 1 and gate.shape[0] in (heads, query_heads):
        return gate.expand(batch, length, -1)
    if gate.dim() == 3 and gate.shape[:2] == (batch, length) and gate.shape[2] in (heads, query_heads):
        return gate
    raise ValueError(
        f"log_gate: expected ({batch}, {length}, Hq or H) or (Hq or H,) with Hq = {query_heads}, H = {heads}, "
        f"got {shape_of(gate)}"
    )


def _check_score(factors: Factors) -> None:
    score, (_, steps) = factors.score, factors.parts()
    if isinstance(score, Power):
        if score.form in ("chunked", "recurrent") and steps is not None:
            raise ValueError(f"score.form: Householder steps allow 'attention' and 'auto' only, got {score.form!r}")
    elif not isinstance(score, str) or score not in ("softmax", "stick-breaking"):
        raise ValueError(f"score: expected 'softmax', 'stick-breaking' or Power(p), got {score!r}")


_checked: tuple[weakref.ref[Tensor], int, int, list[int]] | None = None
"""The GPU boundaries validated last, with their version, T and values: a model's layers share one tensor."""


def check_documents(
    cu_seqlens: object, q: Tensor, cp: ContextParallel | None = None, *, fresh: bool = False
) -> list[int] | None:
    """Validates cu_seqlens and returns them as Python integers; None if there are none or they are traced.

    Traced boundaries are validated at run time by the operators that use them. Boundaries on a GPU cost one device
    synchronisation per tensor, and another after every write that bumps its version counter, which collectives do
    not. With cp, q is a shard of the sequence.

    Args:
        fresh: ignore the cached result, except during CUDA graph capture, which cannot synchronise. Models do so once
            per forward pass.
    """
    global _checked
    length = q.shape[1] * (1 if cp is None else cp.size)
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        came = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens: expected an int32 tensor, got {came}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected shape (N + 1,) with N of 1 or more, got {shape_of(cu_seqlens)}")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: packed sequences need B = 1, got B = {q.shape[0]}")
    if traced(cu_seqlens) or traced(q):
        return None
    if not cu_seqlens.is_cuda or cu_seqlens.is_inference():  # inference tensors have no version counter
        return boundaries(cu_seqlens, length)
    known = None if fresh and not torch.cuda.is_current_stream_capturing() else _checked  # others may change it
    if known is not None and known[0]() is cu_seqlens and known[1:3] == (cu_seqlens._version, length):
        return known[3]
    bounds = boundaries(cu_seqlens, length)
    _checked = weakref.ref(cu_seqlens), cu_seqlens._version, length, bounds
    return bounds
