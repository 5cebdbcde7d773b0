"""The objectives of conversion, by their definitions, on models of a few thousand weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deadreckon as dr
from deadreckon.lab.training.distillation import OBJECTIVES, load_teacher
from deadreckon.tasks.task import Batch

Models = tuple[dr.DeadReckonForCausalLM, dr.DeadReckonForCausalLM]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """A student, whose attention is not the teacher's yet, and the teacher."""
    torch.manual_seed(0)
    source = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3, intermediate_size=48,
            initializer_range=0.3, vocab_size=260,
        )
    )  # fmt: skip
    source.save_pretrained(tmp_path)
    return dr.convert_model(source, "path", exact=False), load_teacher(str(tmp_path))


def test_attention_is_compared_on_what_the_teacher_sees(models: Models) -> None:
    """In every layer, whatever the student's layers before it do."""
    student, teacher = models
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(0))
    context, errors = dr.Context.of(teacher.model.embed_tokens(tokens), tokens, None), []
    seen = teacher.model(tokens, output_hidden_states=True).hidden_states
    for x, ours, theirs in zip(seen, student.model.layers, teacher.model.layers, strict=False):
        found, expected = (one.self_attn(one.input_layernorm(x), context=context) for one in (ours, theirs))
        errors.append((found - expected).square().sum() / expected.square().sum())
    found = OBJECTIVES["align"](student, teacher, Batch(tokens, tokens))
    assert len(errors) == 3 and min(errors) > 0.01
    torch.testing.assert_close(found, torch.stack(errors).mean())
    found.backward()
    assert all(p.grad is not None for p in student.model.layers[2].self_attn.parameters())
    assert all(p.grad is None for p in [*teacher.parameters(), *student.model.layers[2].mlp.parameters()])


def test_divergences_are_those_of_the_definition(models: Models) -> None:
    """Also where some tokens do not count, and logits come in several parts."""
    student, expected = models
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 5:9] = -100
    log_p, log_q = (model(tokens).logits[:, :-1].log_softmax(-1) for model in (expected, student))
    each = (log_p.exp() * (log_p - log_q)).sum(-1)[labels[:, 1:] != -100]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deadreckon.lab.training.distillation.HEAD_TOKENS", 7)
        found = OBJECTIVES["distil"](student, expected, Batch(tokens, labels))
    torch.testing.assert_close(found, each.mean())
    found.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in expected.parameters())
