"""Attention kernels of other libraries, called as their authors intend, on the same inputs as ours.

A rival's `kind` is our case that computes the same function; the benchmark reports the error of its output and
gradients against that definition. If a rival gives an argument another meaning, its function here compensates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Method:
    """One implementation of one kind of attention."""

    run: Callable[[Inputs], Tensor]
    kind: str
    package: str = "torch"
    exact: tuple[str, ...] = ()  # inputs that it takes in float32 alone

    def prepare(self, inputs: Inputs) -> Inputs:
        """Casts the inputs to the method's precision, so that casts are not timed."""
        return {**inputs, **{name: inputs[name].detach().float().requires_grad_() for name in self.exact}}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal attention over (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sdpa(x: Inputs) -> Tensor:
    """Causal attention with the kernel that PyTorch picks."""
    return causal(x["q"], x["k"], x["v"])


def by_kernel(backend: str, x: Inputs) -> Tensor:
    """Causal attention with this backend, given by name: methods are sent to other processes."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return sdpa(x)


flash = partial(by_kernel, "FLASH_ATTENTION")  # FlashAttention-2
cudnn = partial(by_kernel, "CUDNN_ATTENTION")  # NVIDIA's own


def rotate_half(x: Tensor) -> Tensor:
    """Rotates the pairs (m, m + D/2) by a quarter turn."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as models on Hugging Face apply it."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@cache
def compiled_rotate(device: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], str]:
    """`rotate`, compiled if possible, and a note that says which: eager RoPE is slower, and a weaker baseline."""
    torch._dynamo.config.recompile_limit = 64  # once for every shape, with and without gradients
    compiled = torch.compile(rotate, fullgraph=True, dynamic=False)
    x = torch.ones(2, 2, device=device)
    try:
        compiled(x, x, x, x)
    except Exception as error:
        return rotate, f"RoPE not compiled ({type(error).__name__})"
    return compiled, "RoPE compiled"


def rope_flash(x: Inputs) -> Tensor:
    """RoPE, then FlashAttention. Cosines and sines are inputs: a model computes them once for all its layers."""
    turn, _ = compiled_rotate(x["q"].device.type)
    q, k = turn(x["q"], x["k"], x["cos"], x["sin"])
    return flash({"q": q, "k": k, "v": x["v"]})


def documents_apart(x: Inputs) -> Tensor:
    """A packed row, one call per document."""
    bounds = x["cu_seqlens"].tolist()
    return torch.cat([causal(*(x[name][:, a:b] for name in "qkv")) for a, b in pairwise(bounds)], dim=1)


def varlen(x: Inputs) -> Tensor:
    """FlashAttention (varlen) over a packed row."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = x["cu_seqlens"], int(x["longest"])  # on the CPU: nothing waits
    q, k, v = (x[name][0] for name in "qkv")
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
    assert isinstance(output, Tensor)  # no log-sum-exp unless asked for
    return output.unsqueeze(0)


def fla_path(x: Inputs, gated: bool = False) -> Tensor:
    """The PaTH authors' kernel. It also multiplies gates by its scale, which is divided out first."""
    from fla.ops.path_attn import parallel_path_attn

    gate = x["log_gate"] * x["q"].shape[-1] ** 0.5 if gated else None
    documents = x.get("cu_seqlens")
    output, _ = parallel_path_attn(x["q"], x["k"], x["v"], x["w"], x["beta"], gate, cu_seqlens=documents)
    return output


def fla_fox(x: Inputs) -> Tensor:
    """fla's FoX kernel, which adds gates after scaling, as ours does."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    output: Tensor = parallel_forgetting_attn(x["q"], x["k"], x["v"], x["log_gate"])
    return output


def official_fox(x: Inputs) -> Tensor:
    """The FoX authors' kernel, which prunes nothing unless asked."""
    from forgetting_transformer import forgetting_attention

    output: Tensor = forgetting_attention(x["q"], x["k"], x["v"], x["log_gate"])
    return output


RIVALS: dict[str, dict[str, Method]] = {
    "cpu": {"causal SDPA": Method(sdpa, "attention")},
    "cuda": {
        "RoPE + FlashAttention-2": Method(rope_flash, "RoPE"),
        "FlashAttention-2": Method(flash, "attention"),
        "cuDNN": Method(cudnn, "attention"),
        "fla FoX": Method(fla_fox, "FoX", "fla"),
        "official FoX": Method(official_fox, "FoX", "forgetting_transformer"),
        "fla PaTH": Method(fla_path, "PaTH", "fla", exact=("w",)),
        "fla PaTH-FoX": Method(partial(fla_path, gated=True), "PaTH-FoX", "fla", exact=("w",)),
    },
}
"""Device -> name -> rival. A device's first is its baseline."""

PACKED_RIVALS: dict[str, dict[str, Method]] = {
    "cpu": {"causal SDPA by document": Method(documents_apart, "attention")},
    "cuda": {
        "FlashAttention varlen": Method(varlen, "attention", "torch.nn.attention.varlen"),
        **{name: RIVALS["cuda"][name] for name in ("fla PaTH", "fla PaTH-FoX")},
    },
}
"""The same for packed rows."""


def rivals_on(device: str, packed: bool) -> dict[str, Method]:
    """Methods of other libraries on this device; the first is the baseline."""
    return (PACKED_RIVALS if packed else RIVALS)[device]


def baseline(device: str, packed: bool) -> str:
    """The method that ratios refer to."""
    return next(iter(rivals_on(device, packed)))


def installed(rivals: dict[str, Method]) -> dict[str, Method]:
    """Methods whose package is installed."""
    return {name: rival for name, rival in rivals.items() if find_spec(rival.package) is not None}
