"""Converted models have the logits of their source, or a ValueError says why they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, logsigmoid, pad, rms_norm, silu
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import deadreckon as dr

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": VOCABULARY, "intermediate_size": 64, "initializer_range": 0.15,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SOURCES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama with biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu")
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0})
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-4)),
}


def make_source(name: str) -> Any:
    torch.manual_seed(0)
    model = SOURCES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that are not all alike
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def off(model: Any, source: Any, ids: Tensor) -> float:
    """The greatest difference of logits, in units of their range."""
    found, expected = model(ids).logits, source(ids).logits
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


@pytest.mark.parametrize("name", SOURCES)
def test_logits_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    source = make_source(name)
    model = dr.convert_model(source).eval()
    assert model.config.encoding == "rope-path-fox"
    assert model.config.tie_word_embeddings == (name == "llama3")
    assert off(model, source, tokens(1, 100)) < 1e-4
    assert off(model, source, tokens(2, 1)) < 1e-4
    ids = tokens(2, 30)
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    continued = model.generate(ids, **greedy)
    assert torch.equal(continued, source.generate(ids, **greedy))
    model.save_pretrained(tmp_path)
    again = dr.DeadReckonForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_models_of_ours_with_rope() -> None:
    source = dr.convert_model(make_source("llama3"), "rope")
    model = dr.convert_model(source, "rope-path").eval()
    assert model.config.encoding_options == {"rope-path": source.config.encoding_options["rope"] | {"from_zero": True}}
    assert source.config.encoding == "rope"
    assert off(model, source.eval(), tokens(1, 100)) < 1e-4
    with pytest.raises(ValueError, match="model: expected one of ours with encoding 'rope', got rope-path"):
        dr.convert_model(model)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_long_texts(name: str) -> None:
    source = make_source(name)
    assert off(dr.convert_model(source).eval(), source, tokens(1, 2048)) < 1e-4


@pytest.mark.parametrize("encoding", ["rope", "rope-fox", "rope-path"])
def test_what_else_can_begin_exactly(encoding: str) -> None:
    source = make_source("qwen2")
    model = dr.convert_model(source, encoding).eval()
    assert off(model, source, tokens(1, 100)) < 1e-4
    assert model.dtype == torch.float32
    assert dr.convert_model(source.bfloat16(), encoding).dtype == torch.bfloat16


def test_new_parts_learn() -> None:
    """The exact start is alive: strengths and gates have gradients of a usual start's size, directions follow."""
    source, ids = make_source("llama"), tokens(2, 64)
    grads = {}
    for exact in (True, False):
        torch.manual_seed(0)
        model = dr.convert_model(source, "rope-path-fox", encoding_options={"rank": 4}, exact=exact)
        model(ids, labels=ids).loss.backward()
        grads[exact] = {name: float(p.grad.norm()) for name, p in model.named_parameters() if ".encoding." in name}
        if exact:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            moved = [p for name, p in model.named_parameters() if ".encoding." in name]
    assert len(moved) == 2 * 7
    assert all(p.grad.norm() > 0 for p in moved)
    at_once = [name for name in grads[True] if ".strength." in name or ".gate." in name]
    assert len(at_once) == 2 * 4
    dead = {name: grads[True][name] for name in at_once if grads[True][name] < 0.1 * grads[False][name]}
    assert not dead


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("path-fox", "it has no rotation"),
        ("rope-values", "it turns values too"),
        ("random-rotation", "its angles are not the model's"),
        ("fox", "it has no rotation"),
        ("alibi", "it has no rotation; it forgets from the start"),
        ("stickbreaking", "its score is stick-breaking"),
        ("sinusoidal", "it adds to the embeddings"),
        ("prism", "it adds terms to the logits"),
    ],
)
def test_encodings_that_would_change_something(encoding: str, reason: str) -> None:
    source = make_source("llama")
    with pytest.raises(ValueError, match=f"encoding: '{encoding}' cannot begin with the model's logits: .*{reason}"):
        dr.convert_model(source, encoding)
    if encoding in ("path-fox", "rope-values"):
        swapped = dr.convert_model(source, encoding, exact=False).eval()
        assert off(swapped, source, tokens(1, 20)) > 1e-3
        assert torch.equal(swapped.model.layers[1].mlp.up_proj.weight, source.model.layers[1].mlp.up_proj.weight)


def wrong(name: str) -> Any:
    if name == "vocabulary":
        model = make_source("llama")
        model.lm_head = nn.Linear(48, 50, bias=False)
        return model
    return {
        "window": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
        "layers": lambda: Qwen2ForCausalLM(
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        ),
        "yarn": lambda: LlamaForCausalLM(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
        ),
        "dynamic": lambda: LlamaForCausalLM(
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
        ),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)),
        "headless": lambda: LlamaModel(LlamaConfig(**SIZES)),
        "nothing": lambda: nn.Linear(2, 2),
    }[name]()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("window", "model: expected a mistral model without sliding windows, got sliding_window = 4096"),
        ("layers", "model: expected a qwen2 model without sliding windows, got .*sliding_attention"),
        ("yarn", "model: expected rope_type default, linear or llama3.* got 'yarn'"),
        ("dynamic", "model: expected rope_type default, linear or llama3.* got 'dynamic'"),
        ("gpt2", "model: expected a decoder of one of the kinds llama, .* got GPT2LMHeadModel of kind 'gpt2'"),
        ("headless", "model: expected a causal language model, with lm_head, got LlamaModel"),
        ("nothing", "model: expected a transformers model, got Linear"),
        ("vocabulary", "model: expected lm_head.weight of vocab_size = 97 rows, got 50"),
    ],
)
def test_models_that_cannot_be_converted(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dr.convert_model(wrong(name))


def test_unknown_encodings() -> None:
    with pytest.raises(ValueError, match="encoding: expected one of nope"):
        dr.convert_model(make_source("llama"), "rotary")
    with pytest.raises(ValueError, match="encoding_options: 'rope-path-fox' does not take"):
        dr.convert_model(make_source("llama"), encoding_options={"depth": 3})


# flash-linear-attention -----------------------------------------------------------------------------------------------


class FlaConfig(PreTrainedConfig):
    """With the fields of theirs."""

    model_type = "path_attn"


class FlaModel(nn.Module):
    """The formulas of their models on weights with their names; nothing runs but `logits`."""

    def __init__(self, kind: str, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        fields = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "hidden_act": "swish", "initializer_range": 0.02, "norm_eps": 1e-5,
            "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
            "use_forget_gate": False, "use_low_rank_w": True, "use_w_shortconv": True,
        }  # fmt: skip
        self.config = FlaConfig(**fields | changes)
        self.config.model_type = kind
        width, keys, inner = 32, 16, 40
        shapes = {"model.embeddings": (VOCABULARY, width), "model.norm": (width,), "lm_head": (VOCABULARY, width)}
        for layer in ("model.layers.0", "model.layers.1"):
            shapes |= {f"{layer}.attn_norm": (width,), f"{layer}.mlp_norm": (width,)}
            shapes |= {f"{layer}.attn.{name}_proj": (width, width) for name in "qo"}
            shapes |= {f"{layer}.attn.{name}_proj": (keys, width) for name in "kv"}
            shapes |= {f"{layer}.mlp.gate_proj": (inner, width), f"{layer}.mlp.up_proj": (inner, width)}
            shapes[f"{layer}.mlp.down_proj"] = (width, inner)
            if kind == "forgetting_transformer":
                shapes[f"{layer}.attn.f_proj"] = (4, width)
                continue
            shapes[f"{layer}.attn.bt_proj"] = (2, width)
            if self.config.use_low_rank_w:
                shapes |= {f"{layer}.attn.w_proj.0": (32, width), f"{layer}.attn.w_proj.1": (keys, 32)}
            else:
                shapes[f"{layer}.attn.w_proj"] = (keys, width)
            if self.config.use_w_shortconv:
                shapes[f"{layer}.attn.w_conv1d"] = (keys, 1, 3)
            if self.config.use_forget_gate:
                shapes[f"{layer}.attn.g_proj"] = (4, width)
        self.weights = {f"{name}.weight": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
        for name in [name for name in shapes if name.endswith(("bt_proj", "attn.g_proj", "f_proj"))]:
            self.weights[f"{name}.bias"] = torch.randn(shapes[name][0])

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
        return dict(self.weights)

    def project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.norm_eps)

    def attend(self, layer: str, x: Tensor) -> Tensor:
        q, k, v = (self.project(f"{layer}.{name}_proj", x).unflatten(-1, (-1, 8)) for name in "qkv")
        if self.config.model_type == "forgetting_transformer":
            gate = logsigmoid(self.project(f"{layer}.f_proj", x))
            return dr.attend(q, k, v, log_gate=gate, impl="reference")
        w = x
        for name in ("w_proj.0", "w_proj.1") if self.config.use_low_rank_w else ("w_proj",):
            w = self.project(f"{layer}.{name}", w)
        if self.config.use_w_shortconv:
            w = silu(conv1d(pad(w.mT, (2, 0)), self.weights[f"{layer}.w_conv1d.weight"], groups=16).mT)
        w = w.unflatten(-1, (-1, 8))
        w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        steps = dr.Householder(w, 2 * self.project(f"{layer}.bt_proj", x).sigmoid())
        gate = logsigmoid(self.project(f"{layer}.g_proj", x)) * 8**-0.5 if self.config.use_forget_gate else None
        return dr.attend(q, k, v, transport=steps, log_gate=gate, impl="reference")

    def logits(self, ids: Tensor) -> Tensor:
        x = self.weights["model.embeddings.weight"][ids]
        for layer in ("model.layers.0", "model.layers.1"):
            attended = self.attend(f"{layer}.attn", self.norm(f"{layer}.attn_norm", x)).flatten(-2)
            x = x + self.project(f"{layer}.attn.o_proj", attended)
            y = self.norm(f"{layer}.mlp_norm", x)
            y = silu(self.project(f"{layer}.mlp.gate_proj", y)) * self.project(f"{layer}.mlp.up_proj", y)
            x = x + self.project(f"{layer}.mlp.down_proj", y)
        return self.project("lm_head", self.norm("model.norm", x))


@pytest.mark.parametrize(
    ("encoding", "kind", "changes"),
    [
        ("path", "path_attn", {}),
        ("path-fox", "path_attn", {"use_forget_gate": True}),
        ("path", "path_attn", {"use_low_rank_w": False, "use_w_shortconv": False}),
        ("fox", "forgetting_transformer", {}),
    ],
)
def test_models_of_flash_linear_attention(encoding: str, kind: str, changes: dict[str, Any]) -> None:
    source, ids = FlaModel(kind, **changes), tokens(2, 70)
    model = dr.convert_model(source).eval()  # type: ignore[arg-type]
    assert model.config.encoding == encoding
    torch.testing.assert_close(model(ids).logits, source.logits(ids), rtol=1e-4, atol=1e-4)


def test_parts_of_flash_linear_attention_that_ours_lacks() -> None:
    for name, value in (("window_size", 64), ("use_output_gate", True), ("qk_norm", True)):
        with pytest.raises(ValueError, match=f"model: expected a forgetting_transformer model without .*{name} = "):
            dr.convert_model(FlaModel("forgetting_transformer", **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="encoding: expected 'path', the model's own, without options, got 'fox'"):
        dr.convert_model(FlaModel("path_attn"), "fox")  # type: ignore[arg-type]


@pytest.mark.parametrize(("encoding", "gated"), [("path", False), ("path-fox", True), ("fox", True)])
def test_layers_of_flash_linear_attention_themselves(
    encoding: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their models give what ours do: on a CPU, interpreted, in float32; on a GPU in bfloat16, as nearly as ours."""
    models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    on_gpu = torch.cuda.is_available()
    name = "ForgettingTransformer" if encoding == "fox" else "PaTHAttention"
    options: dict[str, bool] = {} if encoding == "fox" else {"use_forget_gate": gated}
    if not on_gpu:
        options |= dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), False)
        monkeypatch.setattr("triton.runtime.autotuner.Autotuner._bench", lambda *_, **__: [1.0, 1.0, 1.0])  # any
    config = getattr(models, f"{name}Config")(
        hidden_size=128 if on_gpu else 64, num_hidden_layers=2 if on_gpu else 1, num_heads=2 if on_gpu else 1,
        vocab_size=VOCABULARY, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = getattr(models, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:  # so that attention and gates matter
                parameter.mul_(5)
    theirs = theirs.cuda().bfloat16().eval() if on_gpu else theirs.eval()
    ours = dr.convert_model(theirs).eval()
    assert ours.config.encoding == encoding
    ids = tokens(2, 300).cuda() if on_gpu else tokens(1, 70)
    with torch.no_grad():
        found, rounded = theirs(ids, use_cache=False).logits, ours(ids).logits
        exact = ours.double()(ids).logits
    if not on_gpu:  # logits of some 5, by sums of 64 to 200 numbers, each with the rounding of float32
        assert (found - exact).norm() < 1e-4 * exact.norm()
        return
    assert (found - exact).norm() < 2 * (rounded - exact).norm()
    assert (rounded - exact).norm() < 0.1 * exact.norm()
