"""Sharded models (FSDP2) with and without context parallelism learn what one process learns."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from worlds import run_world

import deadreckon as dr

Config, parallelize = dr.DeadReckonConfig, dr.parallelize  # imported here, once for all ranks
MESHES: dict[tuple[int, int], dict[str, Any]] = {
    (2, 2): {"checkpointing": True},
    (4, 1): {"checkpointing": True, "layers_per_group": 2},
    (1, 4): {"layers_per_group": 3},
}


def model_of(encoding: str = "path-fox", **options: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    return dr.DeadReckonForCausalLM(
        Config(
            encoding=encoding,
            vocab_size=11,
            hidden_size=16,
            num_hidden_layers=3,
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
    for shape, options in MESHES.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        model = model_of()
        if dist.get_rank():
            torch.nn.init.zeros_(model.lm_head.weight)  # the first rank's weights count
        model = parallelize(model, mesh, **options)
        found[f"{shape} groups"] = len({id(layer._get_fsdp_state()) for layer in model.model.layers})
        found[str(shape)] = trained(model, mesh.get_local_rank("dp"), shape[0])
        dist.all_reduce(found[str(shape)]["losses"][0], op=dist.ReduceOp.SUM)
        found[str(shape)]["losses"][0] /= 4
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    found["prism"] = trained(parallelize(model_of("prism"), mesh), dist.get_rank(), 4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = dr.DeadReckonForCausalLM(model_of(pad_token_id=3).config)
    model = parallelize(model, mesh, dtype=torch.bfloat16)
    found["meta"] = {name: whole(x) for name, x in model.named_parameters()}
    ids = torch.randint(0, 11, (1, 29), generator=torch.Generator().manual_seed(0))
    found["meta loss"] = model(input_ids=ids, labels=ids).loss.detach()
    parts = [model(input_ids=ids, labels=ids, num_items_in_batch=n).loss.item() for n in (1028, torch.tensor(1028.0))]
    assert parts[0] == parts[1]  # which bfloat16 has not
    for name, arguments, options in (
        ("mesh", (model_of(), init_device_mesh("cpu", (4,))), {}),
        ("model", (torch.nn.Linear(2, 2), mesh), {}),
        ("model", (scalar(), mesh), {}),
        ("layers_per_group", (model_of(), mesh), {"layers_per_group": 0}),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            parallelize(*arguments, **options)
    return found


def scalar() -> dr.DeadReckonForCausalLM:
    """A model with a parameter that is one number."""
    return model_of("rope-fox", encoding_options={"rope-fox": {"learn_factor": True}})


def test_a_mesh_learns_what_one_process_learns() -> None:
    """And a model may begin on the meta device."""
    expected, ranks = trained(model_of(), 0, 1), run_world(4, on_meshes)
    for found, shape in product(ranks, MESHES):
        for name, value in found[str(shape)].items():
            if name == "losses" and shape[0] > 1:  # of one part of the batch, but for the first, and norms
                value, reference = value[[0, 1, 3]], expected[name][[0, 1, 3]]
            else:
                reference = expected[name]
            assert torch.allclose(value, reference, atol=1e-4, rtol=1e-4), (name, value, reference)
        assert found[f"{shape} groups"] == {(2, 2): 3, (4, 1): 2, (1, 4): 1}[shape]
    fresh, alone = dict(model_of().named_parameters()), trained(model_of("prism"), 0, 1)
    for found in ranks:
        for name, value in found["prism"].items():  # with its penalty, which no rank has a part of
            assert name == "losses" or torch.allclose(value, alone[name], atol=1e-4, rtol=1e-4), name
        assert not found["meta"]["model.embed_tokens.weight"][3].any()
        assert abs(float(found["meta loss"]) - 2.398) < 0.1  # log 11: nothing is learnt yet
        for name, value in found["meta"].items():
            assert torch.equal(value, ranks[0]["meta"][name])
            assert value.shape == fresh[name].shape
            assert 0.5 < (value.std() + 1e-3) / (fresh[name].std() + 1e-3) < 2 or value.numel() < 9, name


def on_one_rank() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    model = model_of()
    parameters = list(model.parameters())
    model = parallelize(model, mesh)
    parallelize(scalar(), mesh)
    with torch.device("meta"):
        begun = dr.DeadReckonForCausalLM(model.config)
    begun = parallelize(begun, mesh)
    cast = parallelize(model_of(), mesh, dtype=torch.bfloat16)
    return {
        "same": all(x is y for x, y in zip(model.parameters(), parameters, strict=True)) and model.cp is None,
        "begun": {name: float(x.detach().std()) for name, x in begun.named_parameters()},
        "cast": all(isinstance(x, DTensor) for x in cast.parameters()),
    }


def test_one_rank_has_nothing_to_divide() -> None:
    """And so costs nothing, but for mixed precision."""
    (found,) = run_world(1, on_one_rank)
    assert found["same"] and found["cast"]
    for name, x in model_of().named_parameters():
        assert 0.5 < (found["begun"][name] + 1e-3) / (float(x.detach().std()) + 1e-3) < 2 or x.numel() < 9, name
