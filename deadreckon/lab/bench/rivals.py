"""Other people's attention, each called as its authors mean it, on the inputs that ours gets.

A rival's `kind` is the case of ours that computes the same function; the benchmark shows how far from that definition
its output and gradients are. Where a rival means something else by an argument, its function here makes up for it.
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
    """One way to compute one kind of attention."""

    run: Callable[[Inputs], Tensor]
    kind: str
    package: str = "torch"
    exact: tuple[str, ...] = ()  # inputs that it takes in float32 alone

    def prepare(self, inputs: Inputs) -> Inputs:
        """The inputs in the precision it takes, so that casting them is not timed."""
        return {**inputs, **{name: inputs[name].detach().float().requires_grad_() for name in self.exact}}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention over (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sdpa(x: Inputs) -> Tensor:
    """With the kernel that PyTorch picks."""
    return causal(x["q"], x["k"], x["v"])


def by_kernel(backend: str, x: Inputs) -> Tensor:
    """With this one, by name: other processes are sent it."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return sdpa(x)


flash = partial(by_kernel, "FLASH_ATTENTION")  # FlashAttention-2
cudnn = partial(by_kernel, "CUDNN_ATTENTION")  # NVIDIA's own


def rotate_half(x: Tensor) -> Tensor:
    """A quarter turn of the pairs (m, m + D/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as models on Hugging Face apply it."""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@cache
def compiled_rotate(device: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], str]:
    """`rotate`, compiled where that works, and a word on which it is: eager, it is slower and a softer baseline."""
    torch._dynamo.config.recompile_limit = 64  # once for every shape, with and without gradients
    compiled = torch.compile(rotate, fullgraph=True, dynamic=False)
    x = torch.ones(2, 2, device=device)
    try:
        compiled(x, x, x, x)
    except Exception as error:
        return rotate, f"RoPE not compiled ({type(error).__name__})"
    return compiled, "RoPE compiled"


def rope_flash(x: Inputs) -> Tensor:
    """Cosines and sines are given: a model computes them once for all its layers."""
    turn, _ = compiled_rotate(x["q"].device.type)
    q, k = turn(x["q"], x["k"], x["cos"], x["sin"])
    return flash({"q": q, "k": k, "v": x["v"]})


def documents_apart(x: Inputs) -> Tensor:
    """A packed row, one call a document."""
    bounds = x["cu_seqlens"].tolist()
    return torch.cat([causal(*(x[name][:, a:b] for name in "qkv")) for a, b in pairwise(bounds)], dim=1)


def varlen(x: Inputs) -> Tensor:
    """FlashAttention over a packed row."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = x["cu_seqlens"], int(x["longest"])  # on the CPU: nothing waits
    q, k, v = (x[name][0] for name in "qkv")
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
    assert isinstance(output, Tensor)  # no log-sum-exp unless asked for
    return output.unsqueeze(0)


def fla_path(x: Inputs, gated: bool = False) -> Tensor:
    """The kernel of PaTH's authors. Their scale multiplies gates as well: it is divided out first."""
    from fla.ops.path_attn import parallel_path_attn

    gate = x["log_gate"] * x["q"].shape[-1] ** 0.5 if gated else None
    documents = x.get("cu_seqlens")
    output, _ = parallel_path_attn(x["q"], x["k"], x["v"], x["w"], x["beta"], gate, cu_seqlens=documents)
    return output


def fla_fox(x: Inputs) -> Tensor:
    """Here the gate is added after scaling, as in ours."""
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    output: Tensor = parallel_forgetting_attn(x["q"], x["k"], x["v"], x["log_gate"])
    return output


def official_fox(x: Inputs) -> Tensor:
    """The kernel of FoX's authors, which prunes nothing unless asked."""
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
    """The first is the baseline."""
    return (PACKED_RIVALS if packed else RIVALS)[device]


def baseline(device: str, packed: bool) -> str:
    """What ratios are taken to."""
    return next(iter(rivals_on(device, packed)))


def installed(rivals: dict[str, Method]) -> dict[str, Method]:
    """Those that can be imported here."""
    return {name: rival for name, rival in rivals.items() if find_spec(rival.package) is not None}
