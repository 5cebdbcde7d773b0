"""Other tools: transformers' Auto classes in a fresh process, pipelines, PEFT, keywords that tools pass."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorWithFlattening, DynamicCache, PreTrainedTokenizerFast

import deadreckon as dr

ROOT = Path(__file__).parent.parent


def make_model(encoding: str = "path-fox") -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return dr.DeadReckonForCausalLM(dr.DeadReckonConfig(encoding=encoding, **sizes)).eval()


def save_with_tokenizer(folder: Path) -> None:
    make_model().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(50)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)


def python(cache: Path, *words: str | Path) -> str:
    """Runs a fresh interpreter, without network, and returns what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_auto_classes_load_in_a_fresh_process(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_with_tokenizer(first)
    code = f"""
import sys
from transformers import AutoModel, AutoModelForCausalLM, pipeline
assert "deadreckon" not in sys.modules
assert type(AutoModel.from_pretrained({str(first)!r}, trust_remote_code=True)).__name__ == "DeadReckonModel"
for folder in ({str(first)!r}, {str(second)!r}):  # what has been loaded so can be saved again
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained({str(second)!r})
import deadreckon, torch
assert type(model) is deadreckon.DeadReckonForCausalLM and type(model.config) is deadreckon.DeadReckonConfig
write = pipeline("text-generation", model=model, tokenizer={str(first)!r})
print(write(["3 4 5", "6"], max_new_tokens=2, do_sample=False, batch_size=2)[0][0]["generated_text"][:5])
print(model(torch.arange(9)[None]).logits.double().sum().item())
"""
    text, logits = python(tmp_path / "modules", "-c", code).splitlines()
    assert text == "3 4 5"
    assert float(logits) == pytest.approx(make_model()(torch.arange(9)[None]).logits.double().sum().item(), abs=1e-4)
    assert sorted(path.name for path in second.glob("*.py")) == ["modeling_deadreckon.py"]


def test_keywords_of_tools_change_nothing_or_are_refused() -> None:
    model, ids = make_model(), torch.arange(20).view(2, 10)
    expected = model(ids).logits
    ignored = {"output_attentions": False, "output_hidden_states": None, "position_ids": None}
    assert torch.equal(model(ids, **ignored, token_type_ids=torch.zeros_like(ids)).logits, expected)
    for name, value in (("output_attentions", True), ("lables", ids)):
        with pytest.raises(TypeError, match=f"{name}: expected None or False"):
            model(ids, **{name: value})
    for places in (torch.arange(10), torch.arange(10)[None], torch.arange(10).expand(2, -1)):
        assert torch.equal(model(ids, position_ids=places).logits, expected)
    for places in (torch.arange(1, 11).expand(2, -1), torch.arange(11), torch.arange(20).view(2, 10)):
        with pytest.raises(ValueError, match="position_ids: expected those of documents packed in one row"):
            model(ids, position_ids=places)
    with pytest.raises(ValueError, match="position_ids: expected those of documents packed in one row"):
        model(ids[:1], position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 5]]))


def test_positions_that_follow_from_masks_and_caches_change_nothing() -> None:
    model, ids = make_model().eval(), torch.arange(20).view(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(model(ids, attention_mask=mask, position_ids=counted).logits, expected)
    with pytest.raises(ValueError, match="position_ids: expected those of documents"):
        model(ids, attention_mask=mask, position_ids=counted + 1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        last = model(ids[:, 9:], past_key_values=cache, position_ids=torch.tensor([[9]])).logits
        torch.testing.assert_close(last, model(ids).logits[:, 9:])
        with pytest.raises(ValueError, match="position_ids: expected those of documents"):
            model(ids[:, 9:], past_key_values=cache, position_ids=torch.tensor([[9]]))


def test_boundaries_that_contradict_each_other_are_refused() -> None:
    model, ids = make_model(), torch.arange(20)[None]
    bounds = torch.tensor([0, 5, 20], dtype=torch.int32)
    expected = model(ids, cu_seqlens=bounds).logits
    places = torch.cat([torch.arange(5), torch.arange(15)])[None]
    for same in ({"cu_seq_lens_k": bounds}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.long()}):
        assert torch.equal(model(ids, **same).logits, expected)
        assert torch.equal(model(ids, **same, position_ids=places).logits, expected)
        assert torch.equal(model(ids, **same, position_ids=places[0]).logits, expected)
    for name, other in (
        ("cu_seq_lens_k", bounds + 1),
        ("cu_seq_lens_q", bounds[1:]),
        ("position_ids", places + 1),
        ("position_ids", places[:, 1:]),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            model(ids, cu_seqlens=bounds, **{name: other})


def test_the_decoder_alone_takes_what_tools_pass() -> None:
    """`AutoModel`, too, is given keywords that ask for nothing, and may be asked for a tuple."""
    model, ids = make_model().eval(), torch.arange(20).view(2, 10)
    expected = model.model(ids).last_hidden_state
    asked = {"output_attentions": False, "head_mask": None, "token_type_ids": ids, "position_ids": torch.arange(10)}
    assert torch.equal(model.model(ids, **asked, return_dict=True).last_hidden_state, expected)
    assert torch.equal(model.model(ids, return_dict=False)[0], expected)
    model.config.return_dict = False
    assert isinstance(model.model(ids), tuple) and isinstance(model(ids), tuple)
    with pytest.raises(TypeError, match="output_attentions: expected None or False"):
        model.model(ids, output_attentions=True)


@pytest.mark.parametrize("whole", [False, True])
def test_documents_are_packed_as_a_collator_does(whole: bool) -> None:
    """Loss and logits are those of `cu_seqlens`."""
    model, ids = make_model(), torch.arange(20)
    documents = [{"input_ids": part.tolist()} for part in ids.split([6, 1, 13])]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=whole)(documents)
    assert ("cu_seq_lens_q" in packed) == whole
    found = model(**packed)
    expected = model(ids[None], labels=ids[None], cu_seqlens=torch.tensor([0, 6, 7, 20], dtype=torch.int32))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_peft_finds_what_to_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = ModuleType("peft.utils.constants")
    constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING = targets = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft.utils.constants", constants)
    names = {name.rsplit(".", 1)[-1] for name, _ in make_model().named_modules()}
    assert targets["deadreckon"] and set(targets["deadreckon"]) <= names


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft and accelerate")


@needs_peft
def test_lora_trains_adapters_alone() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=2))
    ids = torch.arange(20).view(2, 10)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert trained and all(re.search(r"(q|v)_proj\.lora_", name) for name in trained)


@needs_peft
@pytest.mark.parametrize(
    ("encoding", "adapted"),
    [
        ("path-fox", ["gate"]), ("rope-path-fox", ["gate"]), ("conformal-sympow", ["gate"]),
        ("prism", ["gates", "no_copy", "copy_query", "copy_key"]),
    ],
)  # fmt: skip
@torch.no_grad()
def test_adapters_of_encodings_add_to_logits(encoding: str, adapted: list[str]) -> None:
    """Not to gates and strengths, which would leave their ranges: then an adapter could not be merged."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    model, ids = get_peft_model(make_model(encoding), adapters).eval(), torch.arange(20).view(2, 10)
    names = [name for name, _ in model.named_parameters()]
    assert all(any(f".{part}.lora" in name for name in names) for part in adapted)
    expected = model(input_ids=ids).logits
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=ids).logits, expected, atol=1e-2)
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, expected, rtol=0, atol=1e-4)


@needs_peft
@pytest.mark.slow
def test_examples_train_and_adapt(tmp_path: Path) -> None:
    examples, cache, trained, adapted = (
        ROOT / "examples",
        tmp_path / "modules",
        tmp_path / "model",
        tmp_path / "adapted",
    )
    text = tmp_path / "text.txt"
    text.write_text("ab " * 1000)
    small = ["--length", "32", "--width", "32", "--layers", "1"]
    training = [examples / "trainer.py", text, "--out", trained, "--steps", "2", *small]
    adapting = [examples / "lora.py", trained, text, "--out", adapted, "--steps", "1", "--length", "32"]
    code = f"""
import runpy, sys
for sys.argv in {[[str(word) for word in words] for words in (training, adapting)]}:  # what they import takes longest
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
    printed = python(cache, "-c", code)
    assert {path.name for path in trained.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert "trainable params" in printed
    assert (adapted / "modeling_deadreckon.py").exists()


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


@pytest.mark.skipif(not installed("trl", "datasets"), reason="needs trl and datasets")
@pytest.mark.slow
def test_example_of_trl_trains_and_resumes(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "3 4", "completion": " 5 6"}\n' * 8)
    words = (ROOT / "examples" / "sft.py", tmp_path / "model", pairs, "--out", tmp_path / "tuned", "--steps")
    assert "2 steps, loss" in python(tmp_path / "modules", *words, "2")
    assert "3 steps, loss" in python(tmp_path / "modules", *words, "3")
    assert {"checkpoint-1", "checkpoint-2", "checkpoint-3"} <= {path.name for path in (tmp_path / "tuned").iterdir()}
    assert (tmp_path / "tuned" / "modeling_deadreckon.py").exists()


@pytest.mark.skipif(not installed("accelerate"), reason="needs accelerate")
@pytest.mark.integration
def test_example_of_accelerate_trains_and_resumes(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("ab " * 1000)
    words = (ROOT / "examples" / "accelerated.py", text, "--out", out, "--length", "32", "--width", "32", "--steps")
    assert "step 2: loss" in python(tmp_path / "modules", *words, "2")
    again = python(tmp_path / "modules", *words, "3")
    assert "resumes at step 2" in again and "step 3: loss" in again
    assert dr.DeadReckonForCausalLM.from_pretrained(out).config.encoding == "path-fox"
