"""Attention on Triton kernels. Each kind is one custom op and one for its backward pass, opaque to `torch.compile`,
checkpointing and CUDA graphs.

Rotations are applied up front, in one pass; plain softmax then goes to PyTorch's own attention, unless keys are much
wider than values; gates are inside a flash kernel of ours (`gated/`); Householder routes climb the tree
(`householder/`); stick-breaking (`stick/`) and even powers (`power/`) have kernels of their own. Heads that are too
wide for the kernels of gates or routes are left to `blockwise`, whose tree is mostly PyTorch's kernels, which are good
at wide products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from deadreckon.ops.blockwise.attend import plain
from deadreckon.ops.blockwise.documents import separated, unpacked
from deadreckon.ops.blockwise.power import form_for
from deadreckon.ops.blockwise.precision import usual_scale
from deadreckon.ops.blockwise.rotation import Turned, for_each_query_head, unchanged
from deadreckon.ops.factors import Factors, Power
from deadreckon.ops.layout import dense
from deadreckon.ops.triton.gated.operator import attend_gated
from deadreckon.ops.triton.gated.short import is_short
from deadreckon.ops.triton.householder.operator import attend_householder
from deadreckon.ops.triton.power.operator import WIDEST, attend_power
from deadreckon.ops.triton.rotation import turn_by, turn_by_steps
from deadreckon.ops.triton.stick.operator import stick_breaking
from deadreckon.ops.triton.tiles import cramped

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_HEAD = 256  # channels
WIDEST_KEY = 512  # of softmax in 16 bits, with values of at most half of `WIDEST_HEAD`, such as PRISM's


def reason_against(q: Tensor, v: Tensor, factors: Factors, packed: bool) -> str | None:
    """What a kernel for these inputs would need; None if there is a kernel."""
    _, log_gate, score = factors
    _, steps = factors.parts()
    if q.dtype not in DTYPES:
        return f"dtype float32, bfloat16 or float16, got {q.dtype}"
    limits, among = dict.fromkeys("DE", _widest_head(q, v, factors, packed)), ""
    if q.shape[3] > WIDEST_HEAD and _wide_keys(q, v, factors):
        limits = {"D": WIDEST_KEY, "E": WIDEST_HEAD // 2}
    if isinstance(score, Power):
        form = form_for(score, q, log_gate is not None)
        if steps is not None or score.p not in WIDEST.get(form, {}):
            return f"score Power(2) or Power(4), not recurrent and without Householder steps, got {score!r}"
        limits = {"D": WIDEST[form][score.p], "E": 128}
    elif limits["D"] < 256:
        limiting = "gates" if log_gate is not None else "packed sequences"
        limiting = "Householder steps" if steps is not None else limiting
        limiting = "sticks on this GPU" if score == "stick-breaking" else limiting
        among = f" with {limiting} in {q.dtype}"
    for (name, limit), width in zip(limits.items(), (q.shape[3], v.shape[3]), strict=True):
        if width % 8 or width > limit:
            return f"{name} a multiple of 8 up to {limit}{among}, got {width}"
    if score == "stick-breaking" and (steps is not None or log_gate is not None):
        return "neither Householder steps nor gates with score 'stick-breaking'"
    return None


def _wide_keys(q: Tensor, v: Tensor, factors: Factors) -> bool:
    """Whether keys may be as wide as `WIDEST_KEY`: their tiles leave no room for wide values or transport."""
    narrow = v.shape[3] <= WIDEST_HEAD // 2 and q.dtype != torch.float32 and not cramped(q)
    return narrow and factors.transport is None and factors.score == "softmax"


def _widest_head(q: Tensor, v: Tensor, factors: Factors, packed: bool) -> int:
    """The widest D and E for which the tiles of softmax and stick-breaking fit into shared memory."""
    _, steps = factors.parts()
    widest = 128 if steps is not None else WIDEST_HEAD
    has_large_tiles = steps is not None or factors.log_gate is not None or packed
    if factors.score == "stick-breaking" and steps is None:
        has_large_tiles = max(q.shape[3], v.shape[3]) > 128 and cramped(q)
    return widest // 2 if q.dtype == torch.float32 and has_large_tiles else widest


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, factors: Factors, scale: float, cu_seqlens: Tensor | None,
    documents: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`deadreckon.attend`; the arguments are already checked, and supported by the kernels.

    `documents` are cu_seqlens as integers, where the host knows them: with powers, documents are then batched.
    """
    _, log_gate, score = factors
    rotation, steps = factors.parts()
    q, scale = usual_scale(q, scale, score)
    if rotation is not None:  # phases run on across documents: only differences matter
        turn = turned(q, k, v, factors)
        return turn.back(attend_fused(turn.q, turn.k, turn.v, turn.factors, scale, cu_seqlens, documents))
    if isinstance(score, Power) and cu_seqlens is not None:
        if documents is None:  # they are kept apart by gates
            factors = factors._replace(log_gate=separated(log_gate, cu_seqlens, k))
            return attend_fused(q, k, v, factors, scale, None)
        return unpacked(attend_fused, q, k, v, factors, scale, documents)
    q, k, v = (dense(x) for x in (q, k, v))
    if score == "stick-breaking":
        return stick_breaking(q, k, v, scale, cu_seqlens)
    if isinstance(score, Power):
        return attend_power(q, k, v, log_gate, scale, score.p, form_for(score, q, log_gate is not None))[0]
    if steps is not None:
        return attend_householder(q, k, v, steps, log_gate, cu_seqlens, scale)
    if log_gate is not None or cu_seqlens is not None or q.shape[3] > WIDEST_HEAD or is_short(q, k, v):
        return attend_gated(q, k, v, log_gate, cu_seqlens, scale)
    return plain(q, k, v, scale)


def turned(q: Tensor, k: Tensor, v: Tensor, factors: Factors) -> Turned:
    """As :func:`deadreckon.ops.blockwise.rotation.turned`, from the first token; phases are in full turns."""
    rotation, steps = factors.parts()
    assert rotation is not None
    k, v, log_gate = for_each_query_head(q, k, v, factors.log_gate, rotation)
    q, k, v, phase = turn_by_steps(q, k, v, rotation.angles, rotation.values)
    if steps is not None:
        w = turn_by(steps.w, phase, 1)
        formula = None if steps.formula is None else steps.formula.then(w, partial(turn_by, sign=1), phase)
        steps = replace(steps, w=w, formula=formula)
    factors = Factors(steps, log_gate, factors.score)
    back = partial(turn_by, phase=phase, sign=-1) if rotation.values else unchanged
    return Turned(q, k, v, factors, phase, back, unit=2 * math.pi)
