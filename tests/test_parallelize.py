"""Sharded models (FSDP2) with and without context parallelism learn what one process learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from worlds import world

import deadreckon as dr

Config, parallelize = dr.DeadReckonConfig, dr.parallelize  # imported here, once for all ranks
MESHES = ((2, 2), (4, 1), (1, 4))


def model_of(encoding: str = "path-fox", **options: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    return dr.DeadReckonForCausalLM(
        Config(
            encoding=encoding,
            vocab_size=11,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
            **options,
        )
    )


def trained(model: dr.DeadReckonForCausalLM, part: int, parts: int) -> dict[str, Tensor]:
    """Parameters after two steps, and the losses, on this part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        ids = torch.randint(0, 11, (4, 29), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), whole(norm)]
    return {"losses": torch.stack(losses), **{name: whole(x) for name, x in model.named_parameters()}}


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def on_meshes() -> dict[str, Any]:
    found = dict[str, Any]()
    for shape in MESHES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        model = model_of()
        if dist.get_rank():
            torch.nn.init.zeros_(model.lm_head.weight)  # the first rank's weights count
        model = parallelize(model, mesh, checkpointing=shape == (2, 2))
        found[str(shape)] = trained(model, mesh.get_local_rank("dp"), shape[0])
        dist.all_reduce(found[str(shape)]["losses"][0], op=dist.ReduceOp.SUM)
        found[str(shape)]["losses"][0] /= 4
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = dr.DeadReckonForCausalLM(model_of().config)
    model = parallelize(model, mesh, dtype=torch.bfloat16)
    found["meta"] = {name: whole(x) for name, x in model.named_parameters()}
    ids = torch.randint(0, 11, (1, 29), generator=torch.Generator().manual_seed(0))
    found["meta loss"] = model(input_ids=ids, labels=ids).loss.detach()
    for name, arguments in (
        ("mesh", (model_of(), init_device_mesh("cpu", (4,)))),
        ("model", (torch.nn.Linear(2, 2), mesh)),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            parallelize(*arguments)
    return found


@pytest.mark.parametrize("shape", MESHES)
def test_a_mesh_learns_what_one_process_learns(shape: tuple[int, int]) -> None:
    expected = trained(model_of(), 0, 1)
    for found in world(4, on_meshes):
        for name, value in found[str(shape)].items():
            if name == "losses" and shape[0] > 1:  # of one part of the batch, but for the first, and norms
                value, reference = value[[0, 1, 3]], expected[name][[0, 1, 3]]
            else:
                reference = expected[name]
            assert torch.allclose(value, reference, atol=1e-4, rtol=1e-4), (name, value, reference)


def test_a_model_may_begin_on_the_meta_device() -> None:
    ranks = world(4, on_meshes)
    fresh = dict(model_of().named_parameters())
    for found in ranks:
        assert abs(float(found["meta loss"]) - 2.398) < 0.1  # log 11: nothing is learnt yet
        for name, value in found["meta"].items():
            assert torch.equal(value, ranks[0]["meta"][name])
            assert value.shape == fresh[name].shape
            assert 0.5 < (value.std() + 1e-3) / (fresh[name].std() + 1e-3) < 2 or value.numel() < 9, name
