"""The decoder in Hugging Face's tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import deadreckon as dr
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.training import engine

VOCABULARY = 13
RANDOM = ("randomized", "random-rotation", "random-rotation-values")


def make_model(encoding: str = "path-fox", **keywords: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes["initializer_range"] = 0.2  # loud enough that tokens matter
    config = dr.DeadReckonConfig(encoding=encoding, vocab_size=VOCABULARY, **{**sizes, **keywords})
    return dr.DeadReckonForCausalLM(config).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def logits(model: dr.DeadReckonForCausalLM, ids: Tensor, **keywords: Any) -> Tensor:
    torch.manual_seed(4)
    with torch.no_grad():
        return model(ids, **keywords).logits


@pytest.mark.parametrize("encoding", dr.ENCODINGS)
def test_save_and_load(encoding: str, tmp_path: Path) -> None:
    model, ids = make_model(encoding, qk_norm=True), tokens(2, 20)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, dr.DeadReckonForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).encoding == encoding
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("encoding", [name for name in dr.ENCODINGS if name not in RANDOM])
def test_padding_changes_nothing(encoding: str) -> None:
    model, ids = make_model(encoding), tokens(3, 30)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0  # left
    mask[1, 25:] = 0  # right
    padded = logits(model, ids, attention_mask=mask)
    for row, kept in ((0, slice(11, 30)), (1, slice(0, 25)), (2, slice(0, 30))):
        alone = logits(model, ids[row : row + 1, kept])
        torch.testing.assert_close(padded[row, kept], alone[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(model, ids, attention_mask=torch.ones_like(ids)), logits(model, ids))


def test_the_decoder() -> None:
    """Pre-norm blocks beside residuals: attention, then a SwiGLU; a norm and the head at the end."""
    model, ids = make_model("nope"), tokens(2, 7)
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers:
        x = x + layer.self_attn(layer.input_layernorm(x))
        y, mlp = layer.post_attention_layernorm(x), layer.mlp
        gate = mlp.gate_proj(y)
        x = x + mlp.down_proj(gate * gate.sigmoid() * mlp.up_proj(y))
    torch.testing.assert_close(logits(model, ids), model.lm_head(model.model.norm(x)))


def test_gpt2_blocks() -> None:
    """LayerNorm, GELU without a gate and biases: logits are those of GPT-2 without positions."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16)).eval()
    theirs.transformer.wpe.weight.data.zero_()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    model = engine.make_model(Recipe(encoding="nope", block="gpt2", layers=2, width=32, heads=4, tied=True), 50).eval()
    names = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj"}
    names |= {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    weights = {}
    for name, x in theirs.transformer.state_dict().items():
        x = x.T if "c_" in name and x.dim() == 2 else x  # GPT-2 keeps them the other way round
        for old, new in names.items():
            name = name.replace(old, new)
        name = name.replace("h.", "layers.", 1).replace("wte", "embed_tokens").replace("ln_f", "norm")
        if "c_attn" in name:
            parts = zip("qkv", x.chunk(3), strict=True)
            weights |= {name.replace("attn.c_attn", f"self_attn.{one}_proj"): part for one, part in parts}
        elif name != "wpe.weight":
            weights[name] = x
    model.model.load_state_dict(weights)
    ids = torch.randint(0, 50, (2, 9))
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits)


def test_packed_sequences() -> None:
    model, ids = make_model(), tokens(1, 30)
    packed = logits(model, ids, cu_seqlens=torch.tensor([0, 12, 30], dtype=torch.int32))
    separate = torch.cat([logits(model, ids[:, :12]), logits(model, ids[:, 12:])], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences have no padding"):
        mask = torch.ones_like(ids).index_fill_(1, torch.tensor([0]), 0)
        model(ids, attention_mask=mask, cu_seqlens=torch.tensor([0, 30], dtype=torch.int32))


def test_loss_is_the_next_tokens_cross_entropy() -> None:
    model, ids = make_model(), tokens(2, 20)
    labels = ids.clone()
    labels[:, :5] = -100
    output = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
    torch.testing.assert_close(output.loss, expected)
    loss, scores = model(ids, labels=labels, return_dict=False)
    torch.testing.assert_close((loss, scores), (output.loss, output.logits))
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, output.logits[:, -1:])
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    torch.testing.assert_close(embedded.logits, output.logits)


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_in_chunks_is_the_loss(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without logits, loss and all gradients are those of the logits; nothing depends on where chunks end."""
    monkeypatch.setattr("deadreckon.models.loss.CHUNK", 7)
    model, ids = make_model("fox", tie_word_embeddings=packed).double(), tokens(1 if packed else 2, 18)
    labels = ids.clone()
    labels[:, 4:9] = -100
    arguments: dict[str, Any] = {"labels": labels}
    if packed:
        arguments |= {"cu_seqlens": torch.tensor([0, 11, 18], dtype=torch.int32), "num_items_in_batch": 5}

    def gradients(skip: bool) -> list[Tensor]:
        model.zero_grad()
        output = model(ids, **arguments, skip_logits=skip)
        assert (output.logits is None) == skip
        output.loss.backward()
        return [output.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-7)  # transformers' loss is in float32
    expected = gradients(True)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(ids, **arguments, skip_logits=True).loss, expected)
    with pytest.raises(ValueError, match="skip_logits: expected labels beside it, got None"):
        model(ids, skip_logits=True)
    labels[0, 12] = -2
    for skip in (True, False):  # neither is a label that is no token taken for another
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(ids, **arguments, skip_logits=skip)


def test_generate_follows_the_logits() -> None:
    model, ids = make_model(), tokens(2, 7)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    beams = model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=3)
    assert beams.shape == (2, 13)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    both = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    alone = model.generate(ids[:1, 3:], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(both[0, 3:], alone[0])


@pytest.mark.parametrize("encoding", ["path-fox", "random-rotation", "conformal-sympow", "prism"])
def test_gradient_checkpointing_gives_the_same_gradients(encoding: str) -> None:
    model, ids = make_model(encoding).train(), tokens(2, 20)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert len(plain) == len(list(model.parameters()))
    torch.testing.assert_close(gradients(), plain)


def test_layers_may_differ() -> None:
    names = ["rope", "path", "sinusoidal"]
    model = make_model(num_hidden_layers=3, layer_encodings=names, encoding_options={"path": {"rank": 4}})
    kinds = [type(layer.self_attn.encoding) for layer in model.model.layers]
    assert kinds == [dr.ENCODINGS[name] for name in names]
    assert model.model.layers[1].self_attn.encoding.steps.down.weight.shape[0] == 4
    assert logits(model, tokens(1, 9)).isfinite().all()
    # What is added to the embeddings is added, once, wherever its layer stands.
    without = make_model(
        num_hidden_layers=3, layer_encodings=["rope", "path", "nope"], encoding_options={"path": {"rank": 4}}
    )
    without.load_state_dict(model.state_dict())
    assert not torch.allclose(logits(without, tokens(1, 9)), logits(model, tokens(1, 9)))


def test_weights_begin_as_asked() -> None:
    model = make_model("selective-rope", initializer_range=0.02, hidden_size=128)
    assert 0.018 < model.model.layers[0].self_attn.q_proj.weight.std() < 0.022
    convolution = model.model.layers[0].self_attn.encoding.convolution.weight  # an encoding keeps its own
    assert 0.4 < convolution.abs().max() <= 0.5
    assert [dr.DeadReckonConfig(hidden_size=n).intermediate_size for n in (64, 96, 512)] == [192, 256, 1376]
    tied = make_model(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("encoding", "option", "before", "now"),
    [
        ("learned-rotation", "initial", "grid", "normal"), ("learned-rotation-values", "initial", "grid", "normal"),
        ("conformal-sympow", "pace", "layer", "head"),
    ],
)  # fmt: skip
def test_models_saved_before_an_option_existed_stay_as_they_are(
    encoding: str, option: str, before: str, now: str, tmp_path: Path
) -> None:
    path, ids = tmp_path / "config.json", tokens(1, 12)
    for value, saved in ((before, False), (before, True), (now, True)):
        model = make_model(encoding, encoding_options={encoding: {option: value}} if value == before else None)
        model.save_pretrained(tmp_path)
        config = json.loads(path.read_text())
        assert config["encoding_options"][encoding].pop(option) == value
        if not saved:
            path.write_text(json.dumps(config))
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert torch.equal(logits(loaded, ids), logits(model, ids))
    # What the model becomes with another encoding is new: it has today's default, and keeps it.
    make_model("rope").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, encoding=encoding).save_pretrained(tmp_path)
    assert json.loads(path.read_text())["encoding_options"] == {encoding: {option: now}}


@pytest.mark.parametrize("encoding", ["path-fox", "rope-path-fox", "selective-rope", "learned-rotation", "prism"])
def test_what_a_checkpoint_lacks_is_drawn(encoding: str, tmp_path: Path) -> None:
    """From a RoPE checkpoint, the parameters of another encoding begin as in a new layer."""
    make_model("rope").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, encoding=encoding)
    for name, found in loaded.model.layers[0].self_attn.encoding.named_parameters():
        drawn = dict(make_model(encoding).model.layers[0].self_attn.encoding.named_parameters())[name]
        assert found.isfinite().all(), name
        assert 0.5 * drawn.std() <= found.std() <= 2 * drawn.std() or drawn.numel() < 8, name
    for name, found in loaded.model.layers[0].self_attn.encoding.named_buffers():
        assert found == 1, name  # the factor on RoPE's angles
    alone = dr.AttentionLayer(32, 4, encoding, n_kv_heads=2, vocab_size=VOCABULARY).encoding
    for name, parameter in alone.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
    assert loaded.accepts_loss_kwargs


def test_packed_documents_learn_as_separate_ones_do() -> None:
    model, ids = make_model(), tokens(1, 30)
    packed = model(ids, labels=ids, cu_seqlens=torch.tensor([0, 12, 30], dtype=torch.int32)).loss
    first, second = (model(ids[:, part], labels=ids[:, part]).loss for part in (slice(0, 12), slice(12, 30)))
    torch.testing.assert_close(packed, (11 * first + 17 * second) / 28)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": "rotary"}, "encoding: expected one of nope"),
        ({"layer_encodings": ["rope"]}, "layer_encodings: expected a name for each of 2 layers, got 1"),
        ({"encoding_options": {"rope": {}}}, "encoding_options: expected names of encodings in use"),
        ({"hidden_size": 30}, "hidden_size: expected a multiple"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 3"),
        ({"layer_encodings": "rope"}, "layer_encodings: expected a list of names, got 'rope'"),
        ({"encodng": "rope"}, "encodng: expected the name of an option, such as encoding"),
        ({"d_model": 32}, "d_model: expected the name of an option, such as hidden_size"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**changes)


def test_bad_calls() -> None:
    model, ids = make_model(), tokens(1, 5)
    with pytest.raises(ValueError, match="input_ids: expected it or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="attention_mask: expected"):
        model(ids, attention_mask=torch.ones(1, 6))
    with pytest.raises(ValueError, match="attention_mask: expected a token that is not padding"):
        model(ids, attention_mask=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="logits_to_keep: expected 0"):
        model(ids, labels=ids, logits_to_keep=1)
