"""Hashes outputs and gradients over a grid of public calls, to show that a refactoring is bit-identical.

    python tests/fingerprint.py > before.txt      # at one commit; words select calls: "attend triton" householder
    python tests/fingerprint.py > after.txt       # at another
    diff before.txt after.txt

Without a GPU, kernels run in Triton's interpreter. Hashes differ between machines and versions of torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import product

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import deadreckon as dr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ("reference", "blockwise", "triton")
SCORES = ("softmax", "stick-breaking", dr.Power(2), dr.Power(4, form="chunked"))


def fingerprint(tensors: Iterable[Tensor | None]) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        if x is not None:
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def wanted(name: str) -> bool:
    return all(word in name for word in sys.argv[1:])


def draw(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()


def attention() -> Iterator[tuple[str, str]]:
    transports, gates, packings = ("none", "rotation", "rotated-values", "householder"), (False, True), (False, True)
    for impl, score, kind, gated, packed in product(IMPLEMENTATIONS, SCORES, transports, gates, packings):
        generator = torch.Generator().manual_seed(0)
        batch, length, width = (1 if packed else 2), 150, 32
        name = f"attend {impl} {score} {kind} gated={gated} packed={packed}"
        if not wanted(name):
            continue
        q, k, v, w = (draw(batch, length, heads, width, generator=generator) for heads in (4, 2, 2, 2))
        beta = draw(batch, length, 2, generator=generator)
        angles, log_gate = (
            draw(batch, length, 1, width // 2, generator=generator),
            draw(batch, length, 4, generator=generator),
        )
        transport = {
            "none": None,
            "rotation": dr.Rotation(angles),
            "rotated-values": dr.Rotation(angles, values=True),
            "householder": dr.Householder(torch.nn.functional.normalize(w, dim=-1), 2 * beta.sigmoid()),
        }[kind]
        bounds = torch.tensor([0, 1, 70, 70, 150], dtype=torch.int32, device=DEVICE) if packed else None
        try:
            output = dr.attend(
                q, k, v, transport=transport, log_gate=torch.nn.functional.logsigmoid(log_gate) if gated else None,
                score=score, cu_seqlens=bounds, impl=impl,
            )  # fmt: skip
            output.square().sum().backward()
            result = fingerprint([output, *(x.grad for x in (q, k, v, w, beta, angles, log_gate))])
        except ValueError as error:
            result = f"ValueError {str(error)[:60]}"
        yield name, result


def models() -> Iterator[tuple[str, str]]:
    for name in filter(wanted, dr.ENCODINGS):
        torch.manual_seed(0)
        config = dr.DeadReckonConfig(
            encoding=name, vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=64, max_position_embeddings=256,
        )  # fmt: skip
        model = dr.DeadReckonForCausalLM(config).to(DEVICE).train()
        tokens = torch.randint(49, (2, 90), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        torch.manual_seed(2)
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        yield f"model {name}", fingerprint([output.logits, *(p.grad for p in model.parameters())])
        if name in ("random-rotation", "random-rotation-values", "randomized"):
            continue
        model.eval()
        text = model.generate(tokens[:1, :70], max_new_tokens=70, do_sample=False, pad_token_id=49)
        yield f"generate {name}", fingerprint([text])


def filters() -> Iterator[tuple[str, str]]:
    generator = torch.Generator().manual_seed(0)
    reset = torch.rand(2, 40, 3, generator=generator).to(DEVICE).requires_grad_()
    move = torch.rand(2, 40, 3, 3, generator=generator).softmax(-1).to(DEVICE).requires_grad_()
    copy = torch.rand(2, 40, 3, 17, generator=generator).softmax(-1).to(DEVICE).requires_grad_()
    gamma = torch.full((3,), 2.0, device=DEVICE, requires_grad=True)
    for jumps in (None, copy):
        histogram = dr.histogram_filter(reset, move, gamma, positions=16, copy=jumps)
        gradients = torch.autograd.grad(histogram.square().sum(), [reset, move, gamma])
        yield f"filter copy={jumps is not None}", fingerprint([histogram, *gradients])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for section in (attention, models, filters):
        for name, result in section():
            print(result, name, flush=True)
