"""A model on many devices: parameters sharded layer by layer (FSDP2), sequences divided among ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deadreckon.models.huggingface import DeadReckonForCausalLM
from deadreckon.ops.parallel.context import ContextParallel, Layout

DIMENSIONS = ("dp", "cp")


def parallelize(
    model: DeadReckonForCausalLM,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    layout: Layout = "zigzag",
) -> DeadReckonForCausalLM:
    """Divides a model, in place, and the sequences that it will be given, among the ranks of a mesh.

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "cp"))
        model = dr.parallelize(dr.DeadReckonForCausalLM(config), mesh, dtype=torch.bfloat16)

    Ranks along "dp" take batches of their own; ranks along "cp" take the same batch, and each computes its shard of
    every sequence (see `DeadReckonModel.cp`). Parameters, gradients and what an optimizer keeps of them are sharded
    over all ranks, each layer being gathered while it computes. Gradients are averaged: what `loss.backward()` leaves
    is the gradient of the mean of the dp ranks' losses.

    Args:
        model: the same on all ranks, on the mesh's kind of device; the first rank's weights count. One on the meta
            device is initialised here, a layer at a time, and so need not fit on one device.
        mesh: a DeviceMesh whose dimensions are "dp", "cp" or both.
        dtype: that layers compute in; parameters and gradients keep their own. None: no mixed precision.
        checkpointing: activation checkpointing: each layer is computed again in the backward pass.
        layout: see :class:`deadreckon.ContextParallel`.
    """
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in DIMENSIONS for name in names):
        raise ValueError(f"mesh: expected dimensions named 'dp', 'cp' or both, got {names or 'none that are named'}")
    if not isinstance(model, DeadReckonForCausalLM):
        raise ValueError(f"model: expected a DeadReckonForCausalLM, got {type(model).__name__}")
    if checkpointing:
        model.gradient_checkpointing_enable()
    ranks = mesh if mesh.ndim == 1 else mesh[names]._flatten("_".join(names))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    for part in (*model.model.layers, model):
        _materialise(model, part, ranks)
        fully_shard(part, mesh=ranks, mp_policy=policy)
    if "cp" in names and mesh["cp"].size() > 1:
        model.cp = ContextParallel(mesh["cp"], layout)
    return model


def _materialise(model: DeadReckonForCausalLM, part: nn.Module, ranks: DeviceMesh) -> None:
    """Gives the parameters of a part that are not sharded yet their storage and values, those of the first rank."""
    own = [(module, name) for module in part.modules() for name, x in module._parameters.items() if _is_whole(x)]
    group = ranks.get_group()
    fresh = dict[int, nn.Parameter]()  # tied weights stay one
    for module, name in own:
        x = module._parameters[name]
        assert x is not None
        if x.is_meta:
            if id(x) not in fresh:
                fresh[id(x)] = nn.Parameter(torch.empty_like(x, device=ranks.device_type), x.requires_grad)
            module._parameters[name] = fresh[id(x)]
    if fresh:
        with torch.no_grad():
            for module in dict.fromkeys(module for module, _ in own):
                model._init_weights(module)
    for module, name in own:
        x = module._parameters[name]
        assert x is not None
        dist.broadcast(x.detach(), dist.get_global_rank(group, 0), group=group)


def _is_whole(x: nn.Parameter | None) -> bool:
    return x is not None and not hasattr(x, "placements")  # as sharded ones, DTensors, have
