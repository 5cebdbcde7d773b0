"""Attention on Triton kernels, one folder per mechanism: its operator and its kernels.

No module here is imported until used: without triton, none can be.

Prefixes: `p_` a pointer, `b_` a block of values, `i_` an index, `m_` a mask. T is always a run-time number; offsets are
64-bit; nothing uses atomics, so that two runs agree bit for bit.
"""

from __future__ import annotations

from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None
