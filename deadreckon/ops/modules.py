"""Which modules a kernel may stand in for."""

from __future__ import annotations

from torch import nn


def is_plain(part: nn.Module) -> bool:
    """Whether a module has plain parameters, no hooks and its class's forward, so that it need not be called."""
    return (
        all(type(x) is nn.Parameter for x in part._parameters.values() if x is not None)  # no shards
        and not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
        and "forward" not in vars(part)  # as accelerate brings weights from where they are offloaded to
    )
