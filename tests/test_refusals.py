"""Invalid arguments that the lab and models reject before they train, write or compute, naming the argument."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import quiet, run_cli, small
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deadreckon as dr
from deadreckon.lab.evaluation import long
from deadreckon.lab.evaluation.long import Answer, Answers, read_answers
from deadreckon.lab.pages.suite import mean_scores
from deadreckon.lab.training import Run, parallel, train_run
from deadreckon.lab.training.parallel import make_runs

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train flipflop --out x --change seed=7", "change: expected a field without an argument of its own, as seed"),
        ("compare flipflop --change encoding=rope", "of its own, as encoding has; got 'encoding=rope'"),
        ("compare flipflop --sweep steps=2 steps=3", "sweep: expected each name once"),
        ("probe x --layer 1", "layer: expected with --cursors or --attention only, got 1"),
        ("probe x --question 5", "question: expected with --cursors or --attention only, got '5'"),
        ("compare flipflop --sweep length=0", "length: expected 1 or more, got 0"),
        ("compare flipflop --sweep length=some", "length: expected 1 or more, got 'some'"),
        ("compare flipflop --change test_lengths=[15]", "test_lengths: expected lengths that flip-flop has, got 15"),
        ("compare flipflop --lengths 15", "lengths: expected lengths that flip-flop (as trained) has, got 15"),
        ("train flipflop --out x --change curriculum.longest=9 curriculum.speed=2", "curriculum: expected longest, st"),
        ("train flipflop --out x --change curriculum.longest=NaN", "shortest, in whole numbers, got {'longest': nan}"),
        ("compare flipflop --picture x.xyz", "picture: expected a file that ends in .png, .svg, .pdf"),
        ("compare flipflop --page /dev/null/x.md", "page: expected a place that can be written to, got /dev/null"),
        ("compare flipflop --page x", "page: expected a file that ends in .md, got x"),
        ("demo --picture x", "picture: expected a file that ends in .png"),
        ("report x --out x.doc", "out: expected a file that ends in .html, .htm, .md, got x.doc"),
        ("bench attention --save x.txt", "save: expected a file that ends in .md, got x.txt"),
        ("probe x --out /dev/null", "out: expected a place that can be written to, got /dev/null"),
        ("train flipflop --out x --export /dev/null/x", "export: expected a place that can be written to"),
        ("train flipflop --out x --timeout 0", "timeout: expected minutes above 0, at most 10080, got 0"),
        ("train flipflop --out x --timeout nan", "timeout: expected minutes above 0, at most 10080, got nan"),
        ("train flipflop --out x --export x/last", "export: expected a folder that is not the run's own, got x/last"),
        ("train flipflop --out x --seed -1", "seed: expected a whole number from 0 to 2^63 − 1, got -1"),
        ("train flipflop --out x --change test_piece=-1", "test_piece: expected 0 or more, got -1"),
        ("train flipflop --out x --change longest=0", "longest: expected 1 or more, got 0"),
        ("train flipflop --out x --change schedules.length=[[0,5],[1,8]]", "length: expected 4 or more"),
        ("train flipflop --out x --mesh dp=1", "mesh: dp=1 needs 1 process of torchrun, got 1; start it with torchrun"),
        ("train copy --encoding prism --out x --change test_positions=1", "prism: expected positions to be"),
        ("compare flipflop --encodings nope,rope --change encoding_options.rope.no=1", "'rope' does not take {'no'"),
        ("probe x --attention --cursor 1", "cursor: expected with --cursors only, got 1"),
        ("train flipflop --out x --change stepz=3", "sharpen, longest, steps, learning_rate"),
        ("train flipflop --out x --change encoding_options.path.rank=0", "change: expected options of path-fox, which"),
        ("compare flipflop --encodings rope,fox --change encoding_options.path.rank=0", "options of rope, fox, which"),
        ("bench steps --encodings rope --change encoding_options.path.rank=0", "expected options of rope, which"),
        ("train flipflop --out /dev/null", "out: expected a place that can be written to, got /dev/null"),
        ("compare flipflop --runs /dev/null", "runs: expected a place that can be written to, got /dev/null"),
        ("convert x --data y --out /dev/null", "out: expected a place that can be written to, got /dev/null"),
        ("eval x --suite long --out /dev/null", "out: expected a place that can be written to, got /dev/null"),
        ("bench attention --lengths 0", "lengths: expected 1 or more, got 0"),
        ("bench attention --head-dim 7", "head_dim: expected an even number, as RoPE's pairs take, got 7"),
        ("bench drift --length 4 --last 9", "last: expected at most length = 4, got 9"),
        ("bench decode --encodings sympow --power 3", "p: expected"),
        ("eval x --recipe copy --change steps=3", "or evaluators, conditions, options, length; got 'steps=3'"),
    ],
)  # fmt: skip
def test_commands(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(parallel, "make_run", lambda *_: pytest.fail("trained"))
    assert run_cli(monkeypatch, *words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_cannot_be_leaves_its_folder_free(tmp_path: Path) -> None:
    for change, said in (
        ('freeze=["zzz"]', "freeze: expected part"),
        ("encoding_options.rope.base=NaN", "base: expected"),
        ("objective=distil teacher=nowhere", "model: expected a folder with config.json"),
    ):
        with pytest.raises(ValueError, match=said):
            train_run(small("rope", 0, *change.split()), tmp_path, console=quiet())
        assert not (tmp_path / "recipe.json").exists()
    assert train_run(small("rope", 0, "steps=1"), tmp_path, console=quiet()).finished


def test_runs_that_fail_do_not_keep_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is printed at once and raised in the end; other runs are finished. (Threads replace processes here.)"""
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(parallel, "_begin", lambda *_: None)
    recipe, console = small("nope", 0, "steps=1"), quiet()
    Run.create(tmp_path / "bad", small("nope", 0, "steps=2"))
    with pytest.raises(ValueError, match="bad holds a run of another recipe: steps 2, not 1"):
        make_runs({tmp_path / "bad": recipe, tmp_path / "good": recipe}, (), "cpu", 2, console)
    assert (tmp_path / "good" / "scores.json").exists()
    assert "bad: " in (said := console.file.getvalue()) and ", failed: out: " in said  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("encoding", "options", "said"),
    [
        ("rope", {"base": 0.0}, "base: expected 1e-06 or more, got 0.0"),
        ("path", {"rank": 0}, "rank: expected 1 or more, got 0"),
        ("selective-rope", {"rank": -1}, "rank: expected 1 or more, got -1"),
        ("path-fox", {"norm_eps": -1}, "norm_eps: expected 0 or more, got -1"),
        ("path-fox", {"gate_scale": float("nan")}, "gate_scale: expected 0 or more, got nan"),
        ("conformal-sympow", {"initial": float("nan")}, "initial: expected 0 or more, got nan"),
        ("prism", {"similarity": float("nan")}, "similarity: expected a finite number, got nan"),
        ("learned-rotation", {"spread": 0.0}, "spread: expected a positive number, got 0.0"),
    ],
)
def test_options_of_encodings(encoding: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dr.AttentionLayer(16, 2, encoding, vocab_size=20, encoding_options=options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected 1 or more, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected 1 or more, got 0"),
        ({"hidden_size": -32}, "hidden_size: expected 1 or more, got -32"),
        ({"intermediate_size": 0}, "intermediate_size: expected 1 or more, got 0"),
        ({"pad_token_id": 99}, "pad_token_id: expected a token below 20, got 99"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected 0 or more, got -1.0"),
        ({"initializer_range": float("nan")}, "initializer_range: expected 0 or more, got nan"),
    ],
)
def test_sizes_of_models(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dr.DeadReckonConfig(**SIZES | changes)


def test_inputs_of_models() -> None:
    model, ids = (
        dr.DeadReckonForCausalLM(dr.DeadReckonConfig(**SIZES, encoding="path-fox")).eval(),
        torch.ones(1, 9).long(),
    )
    additive = torch.tensor([[-1e9] * 3 + [0.0] * 6])
    for arguments, said in (
        ({"input_ids": ids[0]}, r"input_ids: expected tokens \(B, T\), got torch.int64 \(9,\)"),
        ({"input_ids": ids.float()}, r"input_ids: expected tokens \(B, T\), got torch.float32 \(1, 9\)"),
        (
            {"inputs_embeds": torch.ones(1, 9, 8)},
            r"inputs_embeds: expected .* = 16\), got \(1, 9, 8\)",
        ),
        (
            {"input_ids": ids, "attention_mask": additive},
            "attention_mask: expected 1 for tokens and 0 for padding, got -1",
        ),
        (
            {"input_ids": ids, "attention_mask": ids * 2},
            "attention_mask: expected 1 for tokens and 0 for padding, got 2",
        ),
        ({"input_ids": ids, "labels": ids[:, :4]}, r"labels: expected \(B, T\) = \(1, 9\), got \(1, 4\)"),
        ({"input_ids": ids, "cu_seqlens": [0, 4, 9]}, "cu_seqlens: expected"),
        ({"input_ids": [[1, 2]]}, "input_ids: expected a torch.Tensor, got list"),
        ({"input_ids": ids.bool()}, r"input_ids: expected tokens \(B, T\), got torch.bool"),
        ({"input_ids": ids[:, :0]}, r"input_ids: expected \(B, T\) with B and T of 1 or more, got \(1, 0\)"),
        ({"input_ids": ids, "labels": ids.float()}, "labels: expected torch.int64, got torch.float32"),
        ({"input_ids": ids, "attention_mask": [[1] * 9]}, "attention_mask: expected a torch.Tensor or None, got list"),
        ({"input_ids": ids, "past_key_values": ((1, 2),)}, "past_key_values: expected DynamicCache.* got a tuple"),
        ({"input_ids": ids, "logits_to_keep": "all"}, "logits_to_keep: expected a number"),
    ):
        with pytest.raises(ValueError, match=said):
            model(**arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rope_theta": 5e5}, 'rope_theta: expected the name of an option, such as encoding_options={"rope"'),
        ({"n_layer": 1}, "n_layer: expected the name of an option, such as num_hidden_layers"),
        ({"beta": 0.1}, 'beta: expected the name of an option, such as encoding_options={"path-fox": {"beta"'),
        ({"sliding_window": 4}, "sliding_window: expected none, which this model does not have, got 4"),
        ({"attention_dropout": 0.5}, "attention_dropout: expected none"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: expected none"),
        ({"vocab_size": "100"}, "vocab_size: expected an integer, got '100'"),
        ({"hidden_size": 64.0}, "hidden_size: expected an integer, got 64.0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: expected 1 or more, got 0"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: expected a number, got 'x'"),
        ({"encoding": ["path", "fox"]}, "encoding: expected one of"),
        ({"encoding_options": {"path-fox": 16}}, "encoding_options: expected options by encoding"),
        ({"encoding_options": "rank"}, "encoding_options: expected options by encoding"),
    ],
)
def test_what_a_configuration_would_ignore(options: dict[str, Any], said: str) -> None:
    """Options of other models, or in another place: transformers keeps what it does not know."""
    with pytest.raises(ValueError, match=re.escape(said)):
        dr.DeadReckonConfig(**options)


def test_options_that_are_off_and_notes_are_kept() -> None:
    config = dr.DeadReckonConfig(sliding_window=None, attention_dropout=0.0, logit_scale=1.0, note="of mine")
    assert config.note == "of mine"


def test_checkpoints_of_other_models_are_not_loaded(tmp_path: Path) -> None:
    """Many names of a Llama's weights are ours, and it would compute something else."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type: expected 'deadreckon', got 'llama'; .*convert_model"):
        dr.DeadReckonForCausalLM.from_pretrained(tmp_path, encoding="rope")


def test_answers_beside_others_are_to_the_same_questions(tmp_path: Path) -> None:
    path, answer = tmp_path / "answers.jsonl", Answer("vt", 10, 0, 5, None, ["a"], "a", 1.0)
    Answers(path, {"weights": "x", "seed": 5, "data": []}).add([answer])
    assert read_answers(path, {"seed": 5, "data": ["babi"]}) == [answer]
    with pytest.raises(ValueError, match=r"beside: expected answers to seed 0, got .* with 5"):
        read_answers(path, {"seed": 0, "data": []})
    answers = [Answer(task, 10, 0, 5, None, [], "", score) for task, score in (("vt", 1.0), ("cwe", 0.5), ("fwe", 0.0))]
    assert mean_scores(answers, {"vt", "cwe"})["mean"] == {10: 0.75} and "mean" not in mean_scores(answers, {"vt"})


def test_models_of_few_positions_cannot_be_asked_for_more(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=2, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match="lengths: expected at most 16 positions, as gpt2 has, got 30 tokens and 2 new"
    ):
        long.generate(model, PreTrainedTokenizerFast(tokenizer_object=words), ["a " * 30], 2)
