"""Chunked cross-entropy of a language-model head (linear cross-entropy): never all logits in memory at once.

With a vocabulary of 16 384, logits of 131 072 tokens take 4.3 GB in bfloat16, and several times that with the float32
copies of the loss. Here the forward pass overwrites a chunk's logits by their gradient, and computes from it the
gradients of the hidden states and of the head, before the next chunk; the backward pass only scales them. Nothing is
computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deadreckon.ops.pointwise import has_kernels
from deadreckon.ops.tracing import first_derivatives_only

IGNORED = -100  # labels without loss
CHUNK = 1 << 13  # tokens


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ −log softmax(weight · hidden_t)[labels_t] over tokens whose labels are not −100, in float32 or better.

    Args:
        hidden: (N, D).
        weight: (V, D), of the head.
        labels: (N,), already shifted: the token that each hidden state predicts.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels)
    return loss


def _cross_entropy_(logits: Tensor, targets: Tensor, learn: bool) -> Tensor:
    """The losses (N, 1) of logits (N, V) and targets (N, 1); with `learn` logits are overwritten by their gradients."""
    if has_kernels(logits):
        from deadreckon.ops.triton.loss import cross_entropy_

        return cross_entropy_(logits, targets, learn).unsqueeze(1)
    logp = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = -logp.gather(1, targets)
    if learn:
        torch.exp(logp, out=logits)  # softmax, less one at the target
        logits.scatter_add_(1, targets, logits.new_full((), -1.0).expand_as(targets))
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        scored = (labels != IGNORED).unsqueeze(1)
        with torch.autocast(kind, enabled=False):
            # Hidden states of tokens without loss are set to zero, so that they add nothing to the head's gradient.
            inputs, head = hidden.masked_fill(~scored, 0).to(dtype), weight.to(dtype)
            targets = labels.masked_fill(labels == IGNORED, 0).unsqueeze(1)  # other invalid labels still raise
            learning = any(ctx.needs_input_grad[:2])
            grad_hidden = torch.empty_like(inputs) if learning else None
            grad_weight = torch.zeros_like(head, dtype=exact) if learning else None
            loss = torch.zeros((), dtype=exact, device=hidden.device)
            for start in range(0, len(inputs), CHUNK):
                part = slice(start, start + CHUNK)
                grad = inputs[part] @ head.T  # (chunk, V), here still the logits
                # Not in place: compiled by torch 2.11, an output that was modified in place has no gradients.
                loss = loss + _cross_entropy_(grad, targets[part], learning).masked_fill(~scored[part], 0).sum()
                if grad_hidden is not None and grad_weight is not None:
                    torch.mm(grad, head, out=grad_hidden[part])
                    grad_weight += grad.T @ inputs[part]
            if grad_hidden is not None and grad_weight is not None:
                grad_hidden.masked_fill_(~scored, 0)
                ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        if not torch.compiler.is_compiling():  # the compiler traces backward passes with gradients enabled
            first_derivatives_only("skip_logits=False")
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, grads[0] * grad_weight, None
