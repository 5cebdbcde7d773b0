"""Distillation from a teacher: the objectives, frozen parameters, and loading of models.

    align     mean over layers of ‖a_student − a_teacher‖² / ‖a_teacher‖², a the output of a layer's attention, each
              layer on the teacher's hidden states: errors do not propagate from layer to layer, so that all layers
              learn at once
    distil    mean over tokens of KL(teacher ‖ student), of the next token's distribution, in nats

The teacher is one of our models: a RoPE decoder of transformers is converted to encoding "rope" when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

import deadreckon as dr
from deadreckon.lab.environment import check_model
from deadreckon.tasks.task import NOT_SCORED, Batch

HEAD_TOKENS = 1 << 12  # whose logits are held at a time
Objective = Callable[[dr.DeadReckonForCausalLM, dr.DeadReckonForCausalLM, Batch], Tensor]


def load_source(folder: str) -> PreTrainedModel:
    """Loads a causal language model as save_pretrained wrote it, of ours or of transformers, in float32."""
    check_model(Path(folder), ours=False)
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model: expected one that transformers can load, got {folder!r} ({error})") from error


def load_teacher(folder: str) -> dr.DeadReckonForCausalLM:
    """Loads a folder's model, frozen; converts it if it is not one of ours."""
    model = load_source(folder)
    if not isinstance(model, dr.DeadReckonForCausalLM):
        model = dr.convert_model(model, "rope")
    return model.requires_grad_(False).eval()


def load_start(folder: str, **changes: Any) -> dr.DeadReckonForCausalLM:
    """Loads the model to start from, one of ours, with changes of its configuration."""
    check_model(Path(folder))
    model: dr.DeadReckonForCausalLM
    model = dr.DeadReckonForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
    return model


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Freezes the parameters whose names contain one of these parts."""
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(part in name for name in names):
            raise ValueError(f"freeze: expected part of a parameter's name, such as mlp, got {part!r}")
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze: expected to leave something to train, got {', '.join(parts)}")


def align(student: dr.DeadReckonForCausalLM, teacher: dr.DeadReckonForCausalLM, batch: Batch) -> Tensor:
    """The relative error of the student's attention on the teacher's inputs, averaged over layers."""
    with torch.no_grad():
        x = teacher.model.embed_tokens(batch.tokens)
    context = dr.Context.of(x, batch.tokens, batch.cu_seqlens)
    errors, layers = [], zip(student.model.layers, teacher.model.layers, strict=True)
    ours: Any
    theirs: Any
    for ours, theirs in layers:
        with torch.no_grad():
            target = theirs.self_attn(theirs.input_layernorm(x), context=context)
        output = ours.self_attn(ours.input_layernorm(x), context=context)
        errors.append(mse_loss(output.float(), target.float()) / target.float().square().mean())
        with torch.no_grad():
            x = x + target
            x = x + theirs.mlp(theirs.post_attention_layernorm(x))
    return torch.stack(errors).mean()


def distil(student: dr.DeadReckonForCausalLM, teacher: dr.DeadReckonForCausalLM, batch: Batch) -> Tensor:
    """KL(teacher ‖ student) of the next token, averaged over scored tokens; 0 if there are none."""
    with torch.no_grad():
        target = teacher.model(batch.tokens, cu_seqlens=batch.cu_seqlens).last_hidden_state[:, :-1]
    hidden = student.model(batch.tokens, cu_seqlens=batch.cu_seqlens).last_hidden_state[:, :-1]
    scored = (batch.labels[:, 1:] != NOT_SCORED).flatten()

    def divergence(ours: Tensor, theirs: Tensor, counted: Tensor) -> Tensor:
        log_student = student.lm_head(ours).float().log_softmax(-1)
        log_teacher = teacher.lm_head(theirs).float().log_softmax(-1)
        each = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
        return (each * counted).sum()

    parts = zip(*(x.split(HEAD_TOKENS) for x in (hidden.flatten(0, 1), target.flatten(0, 1), scored)), strict=True)
    # Logits are recomputed in the backward pass: those of a whole batch would be the largest tensors there are.
    sums = [checkpoint(divergence, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / scored.sum().clamp(min=1)


OBJECTIVES: dict[str, Objective] = {"align": align, "distil": distil}
