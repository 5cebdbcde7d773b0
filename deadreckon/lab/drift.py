"""How far decoding drifts from the truth: PaTH, token by token in bfloat16, against float64.

Beside ours runs the rule that rewrites every past key at every step, in place and in the cache's precision.

    python -m deadreckon.lab.drift --length 16384 --device cuda
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import normalize
from transformers import DynamicCache

import deadreckon as dr


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖."""
    return float((found.double() - exact).norm() / exact.norm())


@torch.no_grad()
def model_drift(length: int, last: int, device: str, console: Console) -> tuple[float, float]:
    """Errors of the last logits: of one forward pass in bfloat16, and decoded token by token."""
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding="path", vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    model = dr.DeadReckonForCausalLM(config).bfloat16().to(device).eval()
    exact = dr.DeadReckonForCausalLM(config).double().to(device).eval()
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    truth = exact(tokens, logits_to_keep=last).logits
    once = model(tokens, logits_to_keep=last).logits
    cache, logits = DynamicCache(config=config), []
    for token in track(tokens[0].split(1), "logits, token by token", console=console, transient=True):
        logits.append(model(token.unsqueeze(0), past_key_values=cache).logits[:, -1])
    return relative_error(once, truth), relative_error(torch.stack(logits[-last:], dim=1), truth)


@torch.no_grad()
def in_place_drift(length: int, last: int, device: str, console: Console) -> tuple[float, float]:
    """Errors of attention's logits: of keys that are rounded to bfloat16 once, and at every step, in place."""
    generator = torch.Generator().manual_seed(2)
    heads, width = 2, 64

    def draw() -> Tensor:
        return torch.randn(heads, length, width, generator=generator).to(device)

    q, k = (draw().bfloat16() for _ in range(2))
    w, beta = normalize(draw(), dim=-1), 2 * torch.rand(heads, length, 1, generator=generator).to(device)
    exact, kept = k.double(), k.clone()
    truth, rounded, in_place = list[Tensor](), list[Tensor](), list[Tensor]()
    for i in track(range(length), "the rule in place", console=console, transient=True):
        step = w[:, i : i + 1]
        for keys, dtype in ((exact, torch.float64), (kept, torch.float32)):
            past, along = keys[:, :i].to(dtype), step.to(dtype)
            keys[:, :i] = past - beta[:, i : i + 1].to(dtype) * (past @ along.mT) * along
        if i >= length - last:
            query = q[:, i].double().unsqueeze(-1)
            for found, keys in ((truth, exact), (rounded, exact.bfloat16()), (in_place, kept)):
                found.append((keys[:, : i + 1].double() @ query).flatten())
    logits = torch.cat(truth)
    return relative_error(torch.cat(rounded), logits), relative_error(torch.cat(in_place), logits)


def main() -> None:
    """Prints the errors and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--last", type=int, default=256, help="tokens at the end that errors are measured over")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    console, began = Console(), time.perf_counter()
    once, streamed = model_drift(arguments.length, arguments.last, arguments.device, console)
    console.print(f"PaTH, {arguments.length} tokens in bfloat16, error of the last {arguments.last} against float64:")
    console.print(f"  logits, one forward pass   {once:.2e}")
    console.print(f"  logits, token by token     {streamed:.2e}   {streamed / once:.2f} ×")
    once, in_place = in_place_drift(arguments.length, arguments.last, arguments.device, console)
    console.print("Logits of attention, keys in bfloat16:")
    console.print(f"  rounded once               {once:.2e}")
    console.print(f"  rewritten in place         {in_place:.2e}   {in_place / once:.2f} ×")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    console.print(f"{time.perf_counter() - began:.0f} s on {name}, torch {torch.__version__}, seeds 0, 1 and 2")


if __name__ == "__main__":
    main()
