"""A sequence cut into chunks, and how the kernels are tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deadreckon.ops.triton.tiles import Tiling, ceil_div, cramped, mul_single

# For half and for single precision, with up to 64 channels and with up to 128. The tile of "write" is pairs of blocks
# of channels, all other tiles are tokens; "read" and "gradient" loop over the rows of a state, whatever the step.
HALF = {
    "write": {64: Tiling(2, 64, 4, 3), 128: Tiling(2, 64, 8, 3)},
    "read": {64: Tiling(128, 64, 4, 4), 128: Tiling(128, 64, 8, 3)},
    "gradient": {64: Tiling(128, 64, 4, 4), 128: Tiling(128, 64, 8, 3)},
    "forward": {64: Tiling(128, 64, 4, 3), 128: Tiling(128, 64, 8, 3)},
    "queries": {64: Tiling(64, 64, 4, 3), 128: Tiling(128, 32, 8, 2)},
    "keys": {64: Tiling(64, 64, 4, 3), 128: Tiling(64, 32, 8, 2)},
}
SINGLE = {
    "write": {64: Tiling(1, 64, 4, 1), 128: Tiling(1, 64, 8, 1)},
    "read": {64: Tiling(64, 64, 4, 1), 128: Tiling(64, 64, 8, 1)},
    "gradient": {64: Tiling(64, 64, 8, 1), 128: Tiling(64, 64, 8, 1)},
    "forward": {64: Tiling(64, 32, 4, 1), 128: Tiling(64, 32, 8, 1)},
    "queries": {64: Tiling(64, 32, 4, 1), 128: Tiling(64, 32, 8, 1)},
    "keys": {64: Tiling(64, 32, 8, 1), 128: Tiling(64, 32, 8, 1)},
}
SMALL = Tiling(32, 16, 4, 1)  # of gradients of single precision and 128 channels, for 99 KiB of shared memory
CHUNK = {64: 1024, 128: 2048, 0: 4096}  # tokens, by the state width U; 0: wider than 128
PADDING = 128  # transposed sequences are padded to a multiple of so many tokens


def tiling_for(kernel: str, width: int, x: Tensor) -> Tiling:
    """The tiling of a kernel for the dtype and the device of x."""
    if kernel in ("queries", "keys") and width > 64 and x.dtype == torch.float32 and cramped(x):
        return SMALL
    return (SINGLE if x.dtype == torch.float32 else HALF)[kernel][64 if width <= 64 else 128]


def chunk_for(width: int) -> int:
    """Tokens of a chunk for states of this width."""
    return CHUNK[64 if width <= 64 else 128 if width <= 128 else 0]


@dataclass(frozen=True)
class Chunks:
    """The sizes of a sequence in chunks."""

    batch: int
    heads: int  # of keys
    group: int  # query heads of each key head
    length: int
    size: int  # tokens of a chunk

    @classmethod
    def of(cls, q: Tensor, k: Tensor, size: int) -> Chunks:
        """For q (B, T, Hq, D) and k (B, T, H, D); a size of 0 makes the whole sequence one chunk."""
        batch, length, heads, _ = k.shape
        return cls(batch, heads, q.shape[2] // heads, length, size or ceil_div(length, PADDING) * PADDING)

    @property
    def count(self) -> int:
        return ceil_div(self.length, self.size)

    @property
    def key_heads(self) -> int:
        """N: key heads of the whole batch."""
        return self.batch * self.heads

    @property
    def query_heads(self) -> int:
        """N G: query heads of the whole batch."""
        return self.key_heads * self.group

    def tiles(self, tiling: Tiling) -> tuple[int, int]:
        """Tokens of a tile, none of which crosses from one chunk into the next, and the number of tiles."""
        tile = min(tiling.tile, self.size)
        return tile, ceil_div(self.length, tile)


def strides_by_group(x: Tensor, group: int) -> tuple[int, int, int, int]:
    """Strides of batch, key head, query head in its group and token of x (B, T, H G, channels)."""
    return x.stride(0), x.stride(2) * group, x.stride(2), x.stride(1)


@triton.jit
def plus(b_sum, b_x, b_y, DTYPE: tl.constexpr):
    """sum + x y."""
    if tl.float32 == DTYPE:
        return b_sum + mul_single(b_x.to(DTYPE), b_y.to(DTYPE))
    return tl.dot(b_x.to(DTYPE), b_y.to(DTYPE), b_sum)
