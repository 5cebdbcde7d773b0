"""The recurrent network that moves PRISM's cursors: a GRU.

    r, z = σ(W x_t + b + U h_{t−1} + c),   n = tanh(W x_t + b + r ⊙ (U h_{t−1} + c)),   h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

r, z and n each use a third of the rows of W, U, b and c. `torch.compile` would unroll PyTorch's GRU for one fixed
length, so while compiling it is one custom operator, `unrolled`. Without gradients, on a GPU, W x is one matrix product
and the recurrence one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deadreckon.encodings.maps import SelfInitialised
from deadreckon.ops.cursors import LARGEST, by_kernels, gru, mapped
from deadreckon.ops.modules import is_plain
from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.tracing import operator, room_like


def _forward(x: Tensor, before: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Hidden states (B, T, hidden) of x (B, T, inputs), from the one before the first token (B, hidden)."""
    return torch.gru(x, before.unsqueeze(0), [w, u, b, c], True, 1, 0.0, False, False, True)[0].contiguous()


def _room(x: Tensor, before: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], before.shape[1])


def _backward(
    grad: Tensor, x: Tensor, before: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor, hidden: Tensor
) -> list[Tensor]:
    """Gradients of all inputs but hidden. Only d h is sequential in T: gates are recomputed for all tokens at once."""
    past = torch.cat([before.unsqueeze(1), hidden[:, :-1]], dim=1)
    from_input, from_past = torch.nn.functional.linear(x, w, b), torch.nn.functional.linear(past, u, c)
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_past.chunk(3, -1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    # Derivatives of h_t by the pre-activations of r and z, and by U h_{t−1} + c in that of n.
    of_n = (1 - z) * (1 - n * n)
    slopes = torch.cat([of_n * n_h * r * (1 - r), (past - n) * z * (1 - z), of_n * r], dim=-1)
    by_past, arrived, carry = torch.empty_like(slopes), torch.empty_like(hidden), torch.zeros_like(before)
    for t in range(x.shape[1] - 1, -1, -1):
        arrived[:, t] = carry + grad[:, t]
        by_past[:, t] = arrived[:, t].repeat(1, 3) * slopes[:, t]
        carry = torch.addmm(arrived[:, t] * z[:, t], by_past[:, t], u)
    by_input = torch.cat([by_past[..., : 2 * before.shape[1]], arrived * of_n], dim=-1)
    gradients = [by_input @ w, carry]
    gradients += [rows.flatten(0, 1).mT @ y.flatten(0, 1) for rows, y in ((by_input, x), (by_past, past))]
    return gradients + [rows.sum((0, 1)) for rows in (by_input, by_past)]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


unrolled_backward = operator("deadreckon::gru_backward", _backward, lambda grad, *inputs: room_like(*inputs[:6]))
unrolled = operator(
    "deadreckon::gru",
    _forward,
    _room,
    gradients=lambda ctx, grad: tuple(unrolled_backward(grad, *ctx.saved_tensors)),
    save=_save,
)


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
        before, weights = before.unsqueeze(0).contiguous(), [from_input, self.from_hidden(x.dtype), *biases]
        if torch.compiler.is_compiling():
            return unrolled(x, before.squeeze(0), *weights)
        if x.is_cuda:  # cuDNN wants weights in one contiguous buffer: else it warns, and copies them one by one
            sizes, shapes = [w.numel() for w in weights], [w.shape for w in weights]
            parts = torch.cat([w.flatten() for w in weights]).split(sizes)
            weights = [w.view(shape) for w, shape in zip(parts, shapes, strict=True)]
        train = torch.is_grad_enabled()  # else cuDNN saves nothing for backward, which may also run in eval mode
        return torch.gru(x, before, weights, True, 1, 0.0, train, False, True)[0]

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
        return gru(mapped(x, w), b, matrix, c, self.start, places, state, by_place)
