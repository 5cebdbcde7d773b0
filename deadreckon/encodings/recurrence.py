"""The recurrent network that moves PRISM's cursors: a GRU, as in `ops/gru.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deadreckon.encodings.maps import SelfInitialised
from deadreckon.ops.checks import is_differentiated
from deadreckon.ops.cursors import by_kernels, mapped
from deadreckon.ops.gru import LARGEST, gru, gru_from, is_preferred
from deadreckon.ops.modules import is_plain
from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.tracing import traced


class Recurrence(SelfInitialised, nn.RNNBase):  # not nn.GRU, which compilers refuse by name
    """A GRU whose hidden-to-hidden matrix U (3 · hidden, hidden) is initialised, and regularised, to UᵀU = I.

    Args:
        norm: fixes the Frobenius norm of U at this, times a learned factor; nothing then keeps U orthogonal.
        start: whether the initial hidden state is learned (initialised to zero); else it is zero.
    """

    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(self, inputs: int, hidden: int, norm: float | None = None, start: bool = False) -> None:
        super().__init__("GRU", inputs, hidden, batch_first=True)
        self.norm = norm
        if norm is not None:
            self.loudness = nn.Parameter(torch.ones(()))  # the factor; `from_pretrained` finds it by this name alone
        self.start = nn.Parameter(torch.zeros(hidden)) if start else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.orthogonal_(self.weight_hh_l0)
        nn.init.zeros_(self.bias_ih_l0)
        nn.init.zeros_(self.bias_hh_l0)
        for name, value in (("loudness", 1.0), ("start", 0.0)):  # neither is there yet when GRUs are first reset
            if getattr(self, name, None) is not None:
                nn.init.constant_(getattr(self, name), value)

    def orthogonality_error(self) -> Tensor:
        """‖UᵀU − I‖², Frobenius, of the hidden-to-hidden matrix."""
        w: Any = self.weight_hh_l0
        # FSDP has sharded it again by now: every rank computes the same error, and its own shard of the gradient.
        w = at_least_single(w.full_tensor() if hasattr(w, "full_tensor") else w)
        return (w.T @ w - torch.eye(w.shape[1], dtype=w.dtype, device=w.device)).square().sum()

    def first(self, x: Tensor) -> Tensor:
        """The initial hidden state (hidden,), in the dtype of tokens x, but at least single precision."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.new_zeros(self.hidden_size, dtype=dtype) if self.start is None else self.start.to(dtype)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """Hidden states (B, T, hidden) after each token of x, from the one before the first (B, hidden)."""
        x = at_least_single(x)
        from_input, _, *biases = (w.to(x.dtype) for w in self.all_weights[0])
        before, weights = before.contiguous(), [from_input, self.from_hidden(x.dtype), *biases]
        unknown = any(map(is_differentiated, (x, before, *weights)))  # derivatives that the operator does not have
        if unknown or (x.is_cuda and not traced(x) and not is_preferred(x, self.hidden_size)):
            return _by_pytorch(x, before, weights)
        hidden: Tensor = gru(x, before, *weights)
        return hidden

    def from_hidden(self, dtype: torch.dtype) -> Tensor:
        """The hidden-to-hidden matrix U as the GRU uses it: rescaled, if `norm` is set."""
        w = self.weight_hh_l0.to(dtype)
        return w if self.norm is None else w * (self.norm * self.loudness.to(dtype) / w.norm())

    def in_one_kernel(self, x: Tensor) -> bool:
        """Whether :meth:`by_kernel` can be used for x."""
        return by_kernels(x) and self.hidden_size <= LARGEST and is_plain(self)

    def by_kernel(self, x: Tensor, places: Tensor, state: Tensor, by_place: bool = False) -> Tensor:
        """As :meth:`forward`, in float32; at positions (B or 1, T) below 0, padding, it gives the initial state.

        Args:
            state: before the first token, (B, hidden); or, with `by_place`, for a single token, the ring buffer
                (B, kept, hidden) by position, from which it is read and to which the next state is written.
        """
        w, u, b, c = self.all_weights[0]
        matrix = u if self.norm is None else self.from_hidden(torch.float32)
        return gru_from(mapped(x, w), b, matrix, c, self.start, places, state, by_place)


def _by_pytorch(x: Tensor, before: Tensor, weights: list[Tensor]) -> Tensor:
    """Hidden states by PyTorch's network: it has all derivatives, and on a GPU, by cuDNN, it is the faster one for many
    units and rows. cuDNN wants weights in one buffer, or copies each.
    """
    sizes, shapes = [w.numel() for w in weights], [w.shape for w in weights]
    parts = torch.cat([w.flatten() for w in weights]).split(sizes)
    weights = [w.view(shape) for w, shape in zip(parts, shapes, strict=True)]
    train = torch.is_grad_enabled()  # else cuDNN saves nothing for backward, which may also run in eval mode
    return torch.gru(x, before.unsqueeze(0), weights, True, 1, 0.0, train, False, True)[0]
