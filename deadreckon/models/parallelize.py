"""Distributed training: FSDP2 (parameters sharded layer by layer) and context parallelism (sequences sharded)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from deadreckon.models.huggingface import DeadReckonForCausalLM
from deadreckon.ops.parallel.context import ContextParallel, Layout

DIMENSIONS = ("dp", "cp")


def parallelize(
    model: DeadReckonForCausalLM,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    layers_per_group: int = 1,
    layout: Layout = "zigzag",
) -> DeadReckonForCausalLM:
    """Shards a model, in place, and the sequences that it will be given, over the ranks of a mesh.

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "cp"))
        model = dr.parallelize(dr.DeadReckonForCausalLM(config), mesh, dtype=torch.bfloat16)

    Ranks along "dp" take batches of their own; ranks along "cp" take the same batch, and each computes its shard of
    every sequence (see `DeadReckonModel.cp`). Parameters, gradients and optimizer states are sharded over all ranks;
    each layer (or group of layers) is all-gathered while it computes. Gradients are averaged: `loss.backward()` gives
    the gradient of the mean of the dp ranks' losses. On a single rank without mixed precision the model stays as it is,
    at no cost.

    Args:
        model: the same on all ranks, on the mesh's type of device; the first rank's weights are broadcast. A model on
            the meta device is initialised here, a layer at a time, and so need not fit on one device.
        mesh: a DeviceMesh whose dimensions are "dp", "cp" or both.
        dtype: compute dtype of the layers; parameters and gradients keep their own. None: no mixed precision.
        checkpointing: activation checkpointing: each layer is recomputed in the backward pass.
        layers_per_group: how many layers are all-gathered, and their gradients reduce-scattered, at once. Larger groups
            mean fewer, larger messages and less work for the host, but more memory.
        layout: see :class:`deadreckon.ContextParallel`.
    """
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in DIMENSIONS for name in names):
        raise ValueError(f"mesh: expected dimensions named 'dp', 'cp' or both, got {names or 'none that are named'}")
    if not isinstance(model, DeadReckonForCausalLM):
        raise ValueError(f"model: expected a DeadReckonForCausalLM, got {type(model).__name__}")
    if layers_per_group < 1:
        raise ValueError(f"layers_per_group: expected 1 or more, got {layers_per_group}")
    ranks = mesh if mesh.ndim == 1 else mesh[names]._flatten("_".join(names))
    sharded = ranks.size() > 1 or dtype is not None
    numbers = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if sharded and numbers:
        raise ValueError(f"model: expected parameters that can be divided, got {numbers[0]}, which is one number")
    if checkpointing:
        if hasattr(model, "activation_checkpointing_enable"):  # what transformers 5.23 calls it
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    layers: list[nn.Module] = list(model.model.layers) if sharded else []
    groups = [layers[first : first + layers_per_group] for first in range(0, len(layers), layers_per_group)]
    groups.append([model])
    for group in groups:
        for part in group:
            _materialise(model, part, ranks)
        if sharded:
            # Layers cast their inputs; the whole model does not: its inputs include a count of labels.
            mine = replace(policy, cast_forward_inputs=False) if group[0] is model else policy
            fully_shard(group if len(group) > 1 else group[0], mesh=ranks, mp_policy=mine)
    if "cp" in names and mesh["cp"].size() > 1:
        model.cp = ContextParallel(mesh["cp"], layout)
    return model


def _materialise(model: DeadReckonForCausalLM, part: nn.Module, ranks: DeviceMesh) -> None:
    """Allocates and initialises what a part holds and is not sharded yet, and broadcasts the first rank's values."""
    places = [
        (module, held, name)
        for module in part.modules()
        for held in (module._parameters, module._buffers)
        for name, x in held.items()
        if x is not None and not isinstance(x, DTensor)
    ]
    fresh = dict[int, Tensor]()  # tied weights stay one
    for _, held, name in places:
        x = held[name]
        assert x is not None
        if x.is_meta:
            if id(x) not in fresh:
                empty = torch.empty_like(x, device=ranks.device_type)
                fresh[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
            held[name] = fresh[id(x)]  # type: ignore[assignment]
    if fresh:
        with torch.no_grad():
            modules = dict.fromkeys(module for module, *_ in places)
            # Embeddings last: initialising one zeroes its padding row, also if it is tied to the head.
            for module in sorted(modules, key=lambda one: isinstance(one, nn.Embedding)):
                model._init_weights(module)
    group = ranks.get_group()
    for _, held, name in places:
        x = held[name]
        assert x is not None
        dist.broadcast(x.detach(), dist.get_global_rank(group, 0), group=group)
