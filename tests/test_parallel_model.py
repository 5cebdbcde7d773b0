"""Layers and models under context parallelism: outputs, loss and every gradient are those of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from worlds import run_world

import deadreckon as dr

Config = dr.DeadReckonConfig  # imported here, once for all ranks
NAMES = [name for name in dr.ENCODINGS if name != "prism"]
LENGTH = 45  # no multiple of any number of pieces
DOCUMENTS = (0, 7, 30, 45)


def model_of(name: str, positions: int = 64) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    options = {"sinusoidal": {"shift": 9}, "randomized": {"positions": positions}}
    config = Config(
        encoding=name, vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, encoding_options={name: options[name]} if name in options else None,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config).double()


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 3, -100)}


def learnt(name: str, cp: dr.ContextParallel | None, packed: bool) -> dict[str, Tensor]:
    """Loss, logits and gradients; with cp, gradients averaged over ranks."""
    model, inputs = model_of(name), batch(1 if packed else 2)
    if packed:
        inputs["cu_seqlens"] = torch.tensor(DOCUMENTS, dtype=torch.int32)
    model.cp = cp
    torch.manual_seed(2)
    output = model(**inputs)
    output.loss.backward()
    found = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    logits = output.logits
    if cp is not None:
        for grad in found.values():
            dist.all_reduce(grad)
            grad /= cp.size
        logits = cp.gather(logits, length=LENGTH)
    return {"loss": output.loss.detach(), "logits": logits.detach(), **found}


def layer_output(cp: dr.ContextParallel | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = dr.AttentionLayer(16, 2, "path-fox", qk_norm=True, sharpen_beyond=20).double()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64, requires_grad=True)
    y = layer(x) if cp is None else cp.gather(layer(cp.shard(x), cp=cp), length=LENGTH)
    (y * torch.linspace(-1, 1, LENGTH).view(1, -1, 1)).sum().backward()
    return {"output": y.detach(), "x": x.grad}


def loss_alone(cp: dr.ContextParallel | None) -> dict[str, Tensor]:
    """The loss in chunks of tokens, without logits."""
    model = model_of("fox")
    model.cp = cp
    return {"loss": model(**batch(2), skip_logits=True).loss.detach()}


def everything(layout: Any, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    cp = dr.ContextParallel(layout=layout)
    found = {name: learnt(name, cp, packed=False) for name in names}
    found |= {f"packed {name}": learnt(name, cp, packed=True) for name in ("path-fox", "selective-rope", "randomized")}
    found["layer"], found["loss alone"] = layer_output(cp), loss_alone(cp)
    with pytest.raises(ValueError, match="prism: its recurrent network"):
        learnt("prism", cp, packed=False)
    refusals(cp)
    if layout == "zigzag":
        compiled_with_a_mask(cp)
    limited = model_of("randomized", LENGTH)
    limited.cp = cp  # whose padding has no positions
    assert limited(**batch(1)).loss.isfinite()
    return found


def compiled_with_a_mask(cp: dr.ContextParallel) -> None:
    """A mask of ones masks nothing, beside packed documents, too."""
    model, inputs = model_of("fox"), batch(1)
    model.cp = cp
    inputs |= {"cu_seqlens": torch.tensor(DOCUMENTS).int(), "attention_mask": torch.ones(1, LENGTH)}
    expected = model(**inputs).loss
    assert torch.allclose(torch.compile(model, backend="eager")(**inputs).loss, expected, atol=1e-5)


def refusals(cp: dr.ContextParallel) -> None:
    """Masks and boundaries are those of one process, or none."""
    model, inputs = model_of("nope"), batch(2)
    model.cp = cp
    right = torch.ones(2, LENGTH).tril(LENGTH - 5)
    for more, said in (
        ({"attention_mask": torch.ones(2, LENGTH - 1)}, "attention_mask: expected (B, T)"),
        ({"attention_mask": torch.full((2, LENGTH), 2.0)}, "attention_mask: expected 1 for tokens and 0 for padding"),
        ({"attention_mask": torch.zeros(2, LENGTH)}, "attention_mask: expected a token that is not padding"),
        ({"attention_mask": right.flip(1)}, "attention_mask: with context parallelism, expected padding on the right"),
        ({"attention_mask": right}, "labels: expected -100 where tokens are masked, beside context parallelism"),
        ({"cu_seqlens": torch.tensor([0, LENGTH]).int()}, "cu_seqlens: packed sequences need B = 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            model(**inputs, **more)
    one = {name: x[:1] for name, x in inputs.items()}
    for bounds, mask in (([0, LENGTH - 1], None), ([0, LENGTH], right[:1])):
        with pytest.raises(ValueError, match="cu_seqlens: "):
            model(**one, cu_seqlens=torch.tensor(bounds).int(), attention_mask=mask)


WORLDS = {
    (2, "zigzag"): tuple(NAMES),
    (3, "contiguous"): ("path-fox", "selective-rope", "sinusoidal", "random-rotation-values"),
}


@pytest.mark.parametrize(("size", "layout"), WORLDS)
def test_a_model_learns_as_on_one_process(size: int, layout: str) -> None:
    """Packed rows, a layer alone and a loss without logits, too: one test, since two runners would each start ranks."""
    names = WORLDS[size, layout]
    ranks = run_world(size, everything, layout, names)
    for name in names:
        check(ranks, name, learnt(name, None, packed=False))
    for name in ("path-fox", "selective-rope", "randomized"):
        check(ranks, f"packed {name}", learnt(name, None, packed=True))
    check(ranks, "layer", layer_output(None))
    check(ranks, "loss alone", loss_alone(None))


def check(ranks: list[dict[str, dict[str, Tensor]]], name: str, expected: dict[str, Tensor]) -> None:
    for rank in ranks:
        found = rank[name]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # The loss is taken in float32, and gradients begin there; all else is in float64.
            tolerance = 1e-12 if key in ("logits", "output", "x") else 1e-6
            assert (found[key] - value).abs().max() <= tolerance * (1 + value.abs().max()), (name, key)
