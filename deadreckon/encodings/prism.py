"""PRISM: cursors move along the sequence; a head compares the positions of its query cursors and its key cursors.

    e_t = Σ_p h_t[p] f(p), h_t a cursor's distribution over positions, f their sinusoidal encodings: see `cursors.py`
    g_t = the C superpositions of a head, side by side, scaled to norm √d

    logit_ts = μ ⟨q_t, k_s⟩ · scale + (1 − μ) Σ_c |α_c| ⟨g_t^{q,c}, g_s^{k,c}⟩ / √(C · d),    μ ∈ [0, 1] and α of a head

which is one dot product of longer queries and keys; position never enters the residual stream. One module of cursors,
before the first layer or wherever `modules` says, serves all layers up to the next module: each head has its own
cursors. Key cursors belong to key heads, which query heads share in GQA.

Cost: the filter, O(T · P) per cursor, sequential in T; attention with a head_dim of D + C · r, r ≤ d channels for each
superposition. State: keys (of that size) and values, the last hidden states and histograms, and the copy branch's keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deadreckon.encodings.base import Context, Encoding, Sizes
from deadreckon.encodings.cursors import Cursors, Filtered
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.ops.cursors import gathered, widened
from deadreckon.ops.factors import Factors
from deadreckon.ops.pointwise import at_least_single


class Prism(Encoding):
    """Lee 2025.

    Args:
        positions: P, the number of positions that a cursor can be at; it stops at both ends.
        width: d, of the superpositions.
        cursors: C, pairs of cursors per head.
        hidden: hidden size of the recurrent network.
        copy: one in so many key cursors is fixed, and its query cursors may jump; 0 for none.
        base: of the sinusoids' frequencies.
        similarity: initial α.
        gamma: initial γ, above 1. If it is large, only the likeliest position is remembered, so that nothing is learned
            from the alternatives.
        content: initial μ, above 0 and below 1.
        orthogonality: weight of the penalty that keeps the network's hidden-to-hidden matrix orthogonal.
        norm: in place of that penalty, fixes the Frobenius norm of that matrix at this, times a learned factor.
        start: whether the network's initial hidden state is learned; else it is zero. If learned, a number that opens a
            row can look like one that follows a separator.
        noise: standard deviation of noise on the logits of gates in training, which makes cursors decide clearly.
        modules: layers, counted from 0, before which a module of cursors runs, on the input of that layer's attention;
            it serves all layers up to the next module.
    """

    precise = True  # its recurrent network carries what it reads from token to token

    def __init__(
        self,
        sizes: Sizes,
        positions: int = 512,
        width: int = 340,
        cursors: int = 4,
        hidden: int = 100,
        copy: int = 5,
        base: float = 10000.0,
        similarity: float = 1.0,
        gamma: float = 2.0,
        content: float = 0.5,
        orthogonality: float = 1e-3,
        norm: float | None = None,
        start: bool = False,
        noise: float = 0.0,
        modules: Sequence[int] = (0,),
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("positions", positions, 2), ("width", width, 2), ("cursors", cursors, 1), ("hidden", hidden, 1),
            ("copy", copy, 0),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"prism: expected {name} to be an integer of {least} or more, got {value!r}")
        if not 1 < gamma < math.inf:
            raise ValueError(f"prism: expected gamma to be above 1, got {gamma!r}")
        if not 0 < content < 1:
            raise ValueError(f"prism: expected content to be above 0 and below 1, got {content!r}")
        if norm is not None and not norm > 0:
            raise ValueError(f"prism: expected norm to be positive or None, got {norm!r}")
        if not isinstance(start, bool):
            raise ValueError(f"prism: expected start to be True or False, got {start!r}")
        if not 0 <= noise < math.inf:
            raise ValueError(f"prism: expected noise to be 0 or more, got {noise!r}")
        if width % 2:
            raise ValueError(f"prism: expected an even width, sines and cosines, got {width}")
        if copy == 1:
            raise ValueError("prism: expected copy to be 0 or 2 or more, so that some cursors walk, got 1")
        modules = list(modules)
        if not modules or modules != sorted(set(modules)) or not 0 <= modules[0] <= modules[-1] < sizes.layers:
            raise ValueError(
                f"prism: expected modules to be layers from 0 to {sizes.layers - 1}, sorted, got {modules}"
            )
        self.layer, self.width, self.similarity, self.content = sizes.layer, width, similarity, content
        self.orthogonality = orthogonality if norm is None else 0.0
        self.source = max((layer for layer in modules if layer <= sizes.layer), default=None)
        self.mix = nn.Parameter(torch.empty(sizes.n_heads))  # μ = σ of it
        self.alpha = nn.Parameter(torch.empty(sizes.n_heads, cursors))
        self.cursors: Cursors | None = None
        if self.source == sizes.layer:
            served = min((layer for layer in modules if layer > sizes.layer), default=sizes.layers) - sizes.layer
            recurrence = Recurrence(sizes.d_model, hidden, norm, start)
            self.cursors = Cursors(sizes, served, recurrence, positions, width, cursors, copy, base, gamma, noise)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mix, math.log(self.content / (1 - self.content)))
        nn.init.constant_(self.alpha, self.similarity)
        super().reset_parameters()

    def forward(self, x: Tensor, context: Context) -> Factors:
        return Factors()

    def widen(self, q: Tensor, k: Tensor, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        if context.cp is not None:
            raise ValueError("prism: its recurrent network takes one token after the other; expected no cp, got one")
        here = ("prism", self.source)
        if self.cursors is not None:
            context.shared[here] = self.cursors(x, context, q.dtype), torch.is_grad_enabled()
        if self.source is None or here not in context.shared:
            raise ValueError(
                f"prism: expected a module of cursors before layer {self.layer}, got none; say where by `modules`, "
                "and give that layer this encoding"
            )
        layers, with_gradients = context.shared[here]
        if torch.is_grad_enabled() and not with_gradients:  # they would be constants to this layer
            raise ValueError(
                "prism: expected cursors with gradients for the layers after them, got none, as of checkpoints with "
                "use_reentrant=True; gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        found = layers[self.layer - self.source]
        # Undoes the D^(−1/2) scaling of the logits for these channels.
        unscaled = (q.shape[-1] / (self.alpha.shape[1] * self.width)) ** 0.5
        if isinstance(found, Filtered):
            return gathered(q, k, *found, self.mix, self.alpha, unscaled, self.width**0.5)
        mix, alpha = at_least_single(self.mix).sigmoid(), at_least_single(self.alpha)
        gain = (1 - mix).unsqueeze(-1) * alpha.abs() * unscaled
        return (
            widened(q, found.queries, mix, gain, self.width**0.5), widened(k, found.keys, None, None, self.width**0.5)
        )  # fmt: skip

    def penalty(self) -> Tensor | None:
        if self.cursors is None or not self.orthogonality:
            return None
        return self.orthogonality * self.cursors.recurrence.orthogonality_error()

    def own_groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.alpha], "lr": 0.03, "betas": (0.8, 0.92), "weight_decay": 0.0}]
