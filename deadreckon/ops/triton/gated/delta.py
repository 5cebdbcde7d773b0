"""What a backward pass needs of each row: δ = o · do, and the shift −lse with gates since the row's block began."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.gated.launch import Sums, edge_before, gates_since
from deadreckon.ops.triton.kernel import Kernel
from deadreckon.ops.triton.tiles import padded, place_of, strides


@Kernel
@triton.jit(do_not_specialize=["first", "T", "TILES", "HEADS", "GATES"])
def _prepare(
    p_out, p_grad, p_lse, p_left, p_rest, p_edge, p_out_to, p_grad_to, p_delta, p_row_shift,
    s_o, s_g, s_x, s_l, first, T, TILES, HEADS, GROUP, GATES,
    E: tl.constexpr, BE: tl.constexpr, GATED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Output and its gradient, (B, T, Hq, E) -> (N, T, G, E); δ = o · do; −lse (base 2) and gates."""
    s_ob, s_ot, s_oh = s_o
    s_gb, s_gt, s_gh = s_g
    i_g, i_tile, i_n = place_of(GROUP, TILES)
    i_b, i_h = (i_n + first) // HEADS, (i_n + first) % HEADS
    i_hq = i_h * GROUP + i_g
    channel = tl.arange(0, BE)
    row = tl.arange(0, 64)
    token = i_tile.to(tl.int64) * 64 + row
    mask = (token < T)[:, None] & (channel < E)[None, :]
    b_o = tl.load(p_out + i_b * s_ob + i_hq * s_oh + token[:, None] * s_ot + channel[None, :], mask=mask, other=0.0)
    b_g = tl.load(p_grad + i_b * s_gb + i_hq * s_gh + token[:, None] * s_gt + channel[None, :], mask=mask, other=0.0)
    to = i_n * s_x + token[:, None] * (GROUP * E) + i_g * E + channel[None, :]
    inside = (channel < E)[None, :] & (row >= 0)[:, None]
    if COPY:
        tl.store(p_out_to + to, b_o, mask=inside)
        tl.store(p_grad_to + to, b_g, mask=inside)
    at = i_n * s_l + token * GROUP + i_g
    tl.store(p_delta + at, tl.sum(b_o.to(tl.float32) * b_g.to(tl.float32), 1))
    b_row_shift = -tl.load(p_lse + at) * 1.4426950408889634
    if GATED:
        i_c = i_b * GATES + i_hq // (HEADS * GROUP // GATES)
        reference = edge_before(p_edge + i_c * TILES, i_tile * 64)
        b_gate = gates_since(
            p_left + i_c * TILES * 64, p_rest + i_c * TILES * 64, p_edge + i_c * TILES, token, row >= 0, reference
        )
        b_row_shift += b_gate.to(tl.float32)
    tl.store(p_row_shift + at, b_row_shift)


def prepare(
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    sums: Sums | None,
    heads: int,
    first: int,
    copies: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """δ and row shifts, like lse (n, T, G), for n key heads from `first` on of all B·H.

    out and grad are (B, T, Hq, E). With `copies` (n, T, G, E), both are also copied there, head-major.
    """
    delta, row_shift = torch.empty_like(lse), torch.empty_like(lse)
    count, tokens, group = lse.shape
    width = out.shape[3]
    gates = 1 if sums is None else sums.left.shape[1] * heads
    _prepare[(count * tokens // 64 * group,)](
        out, grad, lse, *(sums or (lse, lse, lse)), *(copies or (out, out)), delta, row_shift,
        *strides(out, grad), 0 if copies is None else copies[0].stride(0), lse.stride(0), first,
        out.shape[1], tokens // 64, heads, group, gates,
        E=width, BE=padded(width), GATED=sums is not None, COPY=copies is not None,
    )  # fmt: skip
    return delta, row_shift
