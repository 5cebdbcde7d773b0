"""Arguments of the gated kernels besides q, k and v; how the kernels are tiled and launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.tiles import Tiling, ceil_div, cramped, padded, power_of_two, roomy

WIDEST = 256  # channels for which all tilings keep a tile's gradients in registers
EDGE = 64  # tokens that share one float64 sum of gates; steps of a loop are no larger

TILINGS = {
    "forward": {
        64: Tiling(128, 64, 4, 3),
        128: Tiling(128, 64, 8, 3),
        256: Tiling(64, 32, 4, 2),
        512: Tiling(64, 32, 4, 1),
        1024: Tiling(64, 32, 4, 1),
    },
    "queries": {
        64: Tiling(128, 64, 4, 3),
        128: Tiling(128, 32, 8, 2),
        256: Tiling(64, 32, 4, 2),
        512: Tiling(64, 16, 4, 1),
        1024: Tiling(32, 16, 4, 1),
    },
    "keys": {
        64: Tiling(128, 32, 4, 3),
        128: Tiling(128, 32, 8, 2),
        256: Tiling(64, 32, 4, 1),
        512: Tiling(64, 16, 4, 1),
        1024: Tiling(32, 16, 4, 1),
    },
}

# In 16 bits with 512 channels. Forward, as many queries as fit, so that keys are read less often; backward, as many
# warps as keep a tile's gradients in registers.
WIDE = {"forward": Tiling(128, 32, 8, 2), "queries": Tiling(64, 32, 8, 2), "keys": Tiling(64, 32, 8, 2)}


class Sums(NamedTuple):
    """Running sums of log gates, divided by log 2: c_j = edge[block of j] − left[j] − rest[j]. See `gates.py`."""

    left: Tensor  # (B·H, 1 | G, T padded) float32
    rest: Tensor  # (B·H, 1 | G, T padded) float32: what rounding took from left
    edge: Tensor  # (B·H, 1 | G, blocks) float64


@triton.jit
def edge_below(row, SIZE: tl.constexpr):
    """The last edge up to where a tile begins: that itself, unless tiles are smaller than blocks."""
    if SIZE % 64 == 0:
        return row
    else:
        return row // 64 * 64


@triton.jit
def edge_above(row, SIZE: tl.constexpr):
    """The first edge from where a tile ends: that itself, unless tiles are smaller than blocks."""
    if SIZE % 64 == 0:
        return row
    else:
        return (row + 63) // 64 * 64


@triton.jit
def edge_before(p_edge, token):
    """The running sum of log gates up to the block of 64 tokens that one is in."""
    return tl.load(p_edge + token // 64 - 1, mask=token >= 64, other=0.0)


@triton.jit
def gates_since(p_left, p_rest, p_edge, token, mask, reference):
    """Sums of log gates from a reference to each token, float64."""
    b_edge = tl.load(p_edge + token // 64, mask=mask, other=reference)
    b_left = tl.load(p_left + token, mask=mask, other=0.0).to(tl.float64)
    return (b_edge - reference) - b_left - tl.load(p_rest + token, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def difference(b_row, b_column):
    """The difference of two float64 vectors, (rows, columns) float32, as if rounded once: numbers are float32 pairs."""
    b_high, b_high_column = b_row.to(tl.float32), b_column.to(tl.float32)
    b_rest = (b_row - b_high.to(tl.float64)).to(tl.float32)
    b_rest_column = (b_column - b_high_column.to(tl.float64)).to(tl.float32)
    return (b_high[:, None] - b_high_column[None, :]) + (b_rest[:, None] - b_rest_column[None, :])


class Reach(NamedTuple):
    """The keys and queries in each other's reach through the gates, by block of 64 tokens; both are ascending."""

    both: Tensor  # (2, B·H, 1 | G, blocks) int32

    @property
    def first(self) -> Tensor:
        """(B·H, 1 | G, blocks): the first key that queries of this block or a later one may need."""
        return self.both[0]

    @property
    def last(self) -> Tensor:
        """(B·H, 1 | G, blocks): the end of the queries that may need keys up to this block."""
        return self.both[1]


class Documents(NamedTuple):
    """Packed sequences: where the document of each token begins and ends; padding is one more document."""

    start: Tensor  # (T padded,) int32
    end: Tensor  # (T padded,) int32


def documents_of(cu_seqlens: Tensor | None, length: int) -> Documents | None:
    """The document of each of `length` tokens, padded to whole blocks, from cu_seqlens (N + 1,) on the same device."""
    if cu_seqlens is None:
        return None
    tokens = torch.arange(-(-length // EDGE) * EDGE, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.nn.functional.pad(cu_seqlens.to(torch.int32), (0, 1), value=tokens.shape[0])
    document = torch.searchsorted(bounds, tokens, right=True, out_int32=True).clamp_(max=bounds.shape[0] - 1)
    return Documents(bounds[document - 1], bounds[document])


class Pairs(NamedTuple):
    """Where blocks lie in the sequence: `pairs` times `left` keys, then `right` queries that see them, from `start`."""

    start: int
    pairs: int
    left: int
    right: int


def _tiling(kernel: str, q: Tensor, v: Tensor) -> Tiling:
    """As tuned on Hopper; wide heads and float32 take smaller tiles, and still smaller ones on other GPUs."""
    widest = max(padded(q.shape[-1]), padded(v.shape[-1])) * q.element_size() // 2
    if widest == 512 and q.dtype != torch.float32 and roomy(q):
        return WIDE[kernel]
    if widest > 128 and not roomy(q):
        widest *= 2
    if widest > 256 and cramped(q) and q.dtype == torch.float32:
        widest *= 2
    return TILINGS[kernel][min(max(64, widest), 1024)]


class Launch:
    """What the three kernels share: sizes, gates and flags."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, pairs: Pairs | None, reach: Reach | None,
        documents: Documents | None,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.group, self.count, self.rows, _ = q.shape
        self.keys = k.shape[3]
        self.q, self.v = q, v
        self.gates = (q, q, q) if sums is None else sums
        gate_heads, blocks = (1, 1) if sums is None else (sums.left.shape[1], sums.edge.shape[2])
        start, _, left, right = pairs or (0, 1, 0, 0)
        self.sizes = (self.heads, self.group, gate_heads, blocks, start, left, right)
        self.flags = {
            "D": q.shape[-1], "E": v.shape[-1], "BD": padded(q.shape[-1]), "BE": padded(v.shape[-1]),
            "CAUSAL": pairs is None, "GATED": sums is not None, "PRUNED": reach is not None,
            "PACKED": documents is not None,
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def __call__(self, kernel: Any, which: str, *arguments: Any) -> None:
        """Launches a kernel with one program per tile of keys (`which` = "keys") or of queries."""
        tiling = _tiling(which, self.q, self.v)
        of_keys = which == "keys"
        tokens = self.keys if of_keys else self.rows
        tile = min(tiling.tile, max(64, power_of_two(tokens)))
        tiles = ceil_div(tokens, tile)
        rows, columns = (tiling.step, tile) if of_keys else (tile, tiling.step)
        programs = tiles * self.batch * self.heads * (1 if of_keys else self.group)
        kernel[(programs, self.count)](
            *arguments, self.rows, self.keys, tiles, *self.sizes,
            **self.flags, BM=rows, BN=columns, **tiling.options,
        )  # fmt: skip
