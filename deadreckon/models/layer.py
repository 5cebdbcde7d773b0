"""The attention layer: projections, QK-norm, GQA and streaming, once, for every encoding."""

from __future__ import annotations

import math
from inspect import signature
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from deadreckon.encodings import ENCODINGS
from deadreckon.encodings.base import CROPPABLE, Context, Encoding, Sizes, check_sharpening
from deadreckon.models.state import LayerState, Origin
from deadreckon.ops.attention import IMPLEMENTATIONS, Implementation, attend, attend_next, check_documents
from deadreckon.ops.norm import residual_norm
from deadreckon.ops.streaming.past import lasting
from deadreckon.ops.tracing import cast_once

if TYPE_CHECKING:
    from deadreckon.ops.parallel.context import ContextParallel

RESET = -1e4  # a log gate that blocks all preceding tokens
LEAST = {"rank": 1, "base": 1e-6, "initial": 0, "norm_eps": 0, "gate_scale": 0}  # minimum of options of encodings


def make_encoding(name: str, sizes: Sizes, options: dict[str, Any] | None = None) -> Encoding:
    """Builds the encoding of that name; options are the keywords of its class."""
    if not isinstance(name, str) or name not in ENCODINGS:
        raise ValueError(f"encoding: expected one of {', '.join(ENCODINGS)}; got {name!r}")
    options = {} if options is None else options
    known = {one.name: one.default for one in signature(ENCODINGS[name]).parameters.values() if one.name != "sizes"}
    if not isinstance(options, dict) or not options.keys() <= known.keys():
        wanted = f"some of {', '.join(known)}, as in {{{next(iter(known))!r}: …}}" if known else "none"
        raise ValueError(f"encoding_options: {name!r} does not take {options!r}: expected {wanted}")
    for option, value in options.items():
        least, default = LEAST.get(option, -math.inf), known[option]
        if isinstance(default, Real) and not isinstance(default, bool) and not isinstance(value, Real):
            raise ValueError(f"{option}: expected a number, got {value!r}")
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= least):
            wanted = "a finite number" if least == -math.inf else f"{least} or more"
            raise ValueError(f"{option}: expected {wanted}, got {value!r}")
    try:
        return ENCODINGS[name](sizes, **options)
    except TypeError as error:
        raise ValueError(f"encoding_options: {name!r} does not take {options}: {error}") from error


class AttentionLayer(nn.Module):
    """Multi-head causal attention (MHA, GQA or MQA) with one position encoding.

    Args:
        d_model: width of the input and output.
        n_heads: query heads.
        encoding: a name in :data:`deadreckon.ENCODINGS`. Encodings that are added to embeddings ("sinusoidal",
            "randomized") do nothing here: call ``layer.encoding.embed`` once, before the first layer.
        n_kv_heads: key and value heads, n_heads by default; must divide n_heads.
        qk_norm: RMS-normalise queries and keys, each head with the same learned gain.
        qk_norm_eps: epsilon of these norms.
        bias: whether the projections to queries, keys and values have biases.
        output_bias: whether the output projection has one.
        head_dim: d_model / n_heads by default.
        vocab_size: for encodings that look tokens up.
        max_length: the longest document, for encodings that scale their angles by it.
        sharpen_beyond: the training length in tokens. Beyond it, a query that sees n tokens is multiplied by
            log n / log sharpen_beyond, so that softmax stays as sharp (gates are not scaled, and powers do not depend
            on it). None, the default: off.
        encoding_options: keywords of the encoding's class.
        place: (index of this layer, counted from 0, number of layers), for encodings that serve several layers at once.
        impl: passed on to :func:`deadreckon.attend` and, with a state, to :func:`deadreckon.attend_next`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        encoding: str = "rope",
        n_kv_heads: int | None = None,
        qk_norm: bool = False,
        *,
        head_dim: int | None = None,
        qk_norm_eps: float = 1e-6,
        bias: bool = False,
        output_bias: bool = False,
        vocab_size: int | None = None,
        max_length: int = 2048,
        sharpen_beyond: int | None = None,
        encoding_options: dict[str, Any] | None = None,
        place: tuple[int, int] = (0, 1),
        impl: Implementation = "auto",
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        whole = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "max_length": max_length}
        for name, value in whole.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads: expected a divisor of n_heads = {n_heads}, got {n_kv_heads}")
        if head_dim is not None and (not isinstance(head_dim, int) or head_dim < 1):
            raise ValueError(f"head_dim: expected an integer of 1 or more, got {head_dim!r}")
        if head_dim is None and d_model % n_heads:
            raise ValueError(f"d_model: expected a multiple of n_heads = {n_heads} (or head_dim), got {d_model}")
        if not 0 <= qk_norm_eps < math.inf:
            raise ValueError(f"qk_norm_eps: expected 0 or more, got {qk_norm_eps!r}")
        if impl not in ("auto", *IMPLEMENTATIONS):
            raise ValueError(f"impl: expected 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}; got {impl!r}")
        check_sharpening(sharpen_beyond)
        head_dim = head_dim or d_model // n_heads
        self.sizes = Sizes(d_model, n_heads, n_kv_heads, head_dim, vocab_size, max_length, *place)
        self.impl: Implementation = impl
        self.sharpen_beyond = sharpen_beyond
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=output_bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps) if qk_norm else nn.Identity()
        self.encoding = make_encoding(encoding, self.sizes, encoding_options)

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cp: ContextParallel | None = None,
        state: Literal["none"] = "none",
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cp: ContextParallel | None = None,
        state: LayerState | None,
    ) -> tuple[Tensor, LayerState]: ...

    @overload
    def forward(
        self, x: Tensor, *, state: LayerState | Literal["none"] | None = "none", context: Context
    ) -> Tensor: ...

    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cp: ContextParallel | None = None,
        state: LayerState | Literal["none"] | None = "none",
        context: Context | None = None,
    ) -> Tensor | tuple[Tensor, LayerState]:
        """Attends over x (B, T, d_model).

        Args:
            x: the input, or the next piece of it.
            token_ids: (B, T), for encodings that look tokens up.
            cu_seqlens: boundaries of packed sequences (B = 1).
            cp: context parallelism: x, token_ids and the output are this rank's shards, cu_seqlens are global.
            state: the state (KV cache) after the preceding tokens, None for the first piece. Any split of a sequence
                into pieces gives the same outputs (unless the encoding draws random numbers), without gradients: x that
                requires them is refused outside ``torch.no_grad()``. An exception, even KeyboardInterrupt, leaves the
                state unchanged.
            context: what a model has computed once for all of its layers, in place of token_ids, cu_seqlens and cp.
                Then only the output is returned.

        Returns:
            The output; with `state`, also the state.
        """
        if context is not None:
            assert state is not None
            return self._advance(x, context, None if state == "none" else state)
        if x.dim() != 3 or x.shape[-1] != self.sizes.d_model:
            raise ValueError(f"x: expected (B, T, d_model = {self.sizes.d_model}), got {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"x: expected at least one token, got shape {tuple(x.shape)}")
        if token_ids is not None and (token_ids.shape != x.shape[:2] or token_ids.is_floating_point()):
            came = f"{token_ids.dtype} {tuple(token_ids.shape)}"
            raise ValueError(f"token_ids: expected integers (B, T) = {tuple(x.shape[:2])}, got {came}")
        check_documents(cu_seqlens, x, cp)
        context = Context.of(x, token_ids, cu_seqlens, cp)
        if state == "none":
            return self._advance(x, context, None)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: packed sequences do not come in pieces; expected None beside a state")
        if cp is not None:
            raise ValueError("cp: a sequence that comes in pieces is not divided among ranks; expected None with state")
        state = LayerState() if state is None else state
        if not isinstance(state, LayerState):
            raise ValueError(f"state: expected a LayerState or None, got {type(state).__name__}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("x: expected no gradients to be required (or torch.no_grad()) beside a state, got some")
        return self._advance(x, context.after(state.length), state), state

    def _advance(self, x: Tensor, context: Context, state: LayerState | None) -> Tensor:
        """The output; the state, if there is one, is advanced atomically."""
        if state is None:
            return self._attend(x, context, None)
        origin = Origin.of(x, type(self.encoding).__name__, self.sizes)
        state.check(origin)
        draft = state.draft()
        with lasting():
            output = self._attend(x, context.remembering(draft.recent), draft)
        draft.origin, draft.kept = origin, min(draft.kept + x.shape[1], CROPPABLE)
        state.become(draft)
        return output

    def placed(self, q: Tensor, k: Tensor, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention takes them: with the encoding's extra channels, and sharpened."""
        q, k = self.encoding.widen(q, k, x, context)
        if self.sharpen_beyond is not None:
            q = (q * context.sharpness(self.sharpen_beyond)).to(q.dtype)
        return q, k

    def _attend(self, x: Tensor, context: Context, state: LayerState | None) -> Tensor:
        width, mapped = self.sizes.head_dim, cast_once(x)
        q, k, v = (project(mapped).unflatten(-1, (-1, width)) for project in (self.q_proj, self.k_proj, self.v_proj))
        # PyTorch's norms may return float32 under autocast.
        q, k = residual_norm(self.q_norm, q)[1].to(v.dtype), residual_norm(self.k_norm, k)[1].to(v.dtype)
        factors, scale = self.encoding(mapped, context), width**-0.5
        q, k = self.placed(q, k, x, context)
        if state is None:
            output = attend(
                q, k, v, **factors._asdict(), scale=scale, cu_seqlens=context.cu_seqlens, impl=self.impl, cp=context.cp
            )
        else:
            if state.left_out is not None:  # left padding: a closed gate at the first real token hides masked ones
                state.gated, gate = factors.log_gate is not None, factors.log_gate
                gate = x.new_zeros(*x.shape[:2], self.sizes.n_heads, dtype=torch.float32) if gate is None else gate
                fresh = (context.positions == 0).unsqueeze(-1)
                factors = factors._replace(log_gate=torch.where(fresh, RESET, gate))
            output = attend_next(q, k, v, **factors._asdict(), scale=scale, past=state.past, impl=self.impl)
        return self.o_proj(output.flatten(-2))
