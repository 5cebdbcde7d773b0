"""`deadreckon convert`, end to end, on a teacher of a few thousand weights."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from small_runs import quiet, run_cli
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import deadreckon as dr
from deadreckon.lab.evaluation import evaluate
from deadreckon.lab.pages.conversion import Converted, convert, measured_once, write_conversions
from deadreckon.lab.recipes import Recipe
from deadreckon.lab.recipes.conversion import Conversion
from deadreckon.lab.recipes.texts import fast_tokenizer
from deadreckon.lab.training import Run, Training
from deadreckon.lab.training.conversion import convert_run, score_before
from deadreckon.lab.training.distillation import OBJECTIVES, load_start, load_teacher
from deadreckon.lab.training.engine import Step
from deadreckon.tasks.language import make_corpora
from deadreckon.tasks.task import Batch
from deadreckon.tasks.text import read_documents
from deadreckon.tasks.tokens import for_transformers, train_tokenizer, write_ids

WORDS = "every where a bell rang and nobody came to see what it had to say"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "intermediate_size": 48, "initializer_range": 0.3, "eos_token_id": 0,
}  # fmt: skip
SMALL = ("batch_size=4", "evaluate_every=20", "validation_rows=2", "test_tokens=512", "warmup=2", "log_every=1")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Llama, drawn, with a tokenizer; two texts beside it."""
    folder, chance = tmp_path_factory.mktemp("teacher"), random.Random(0)
    for name, count in (("train", 20), ("valid", 10)):
        documents = [{"text": " ".join(chance.choices(WORDS.split(), k=200))} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEADRECKON_CACHE", str(folder / "cache"))
        tokenizer = train_tokenizer(folder / "train.jsonl", 270)
        for_transformers(tokenizer).save_pretrained(folder / "llama")
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, vocab_size=tokenizer.get_vocab_size())
        LlamaForCausalLM(config).save_pretrained(folder / "llama")
        yield folder


def conversion(teacher: Path, **changes: Any) -> Conversion:
    texts = str(teacher / "train.jsonl"), str(teacher / "valid.jsonl")
    usual = Conversion(str(teacher / "llama"), "rope-path-fox", *texts, length=32, changes=SMALL)
    return replace(usual, **changes)


def test_the_whole_command(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deadreckon.lab.pages.conversion.NEW", 4)
    out, other = tmp_path / "converted", tmp_path / "other" / "last"
    dr.convert_model(LlamaForCausalLM.from_pretrained(teacher / "llama"), "rope").save_pretrained(other)
    (other / "progress.json").write_text('{"step": 4, "tokens": 1234568}')
    words = [
        "convert", str(teacher / "llama"), "--data", str(teacher / "train.jsonl"), "--held-out",
        str(teacher / "valid.jsonl"), "--out", str(out), "--encoding", "path-fox", "--drop-rope", "--length", "32",
        "--stages", "align,distil,extend", "--freeze", "mlp", "embed_tokens", "--beside", str(other),
        "--change", *SMALL, "steps=6",
        "align.steps=30", "align.learning_rate=0.003",
    ]  # fmt: skip
    assert run_cli(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "error of attention" in printed and "KL to the teacher" in printed and "| student |" in printed
    model, source = load_start(str(out)), LlamaForCausalLM.from_pretrained(teacher / "llama")
    assert model.config.encoding == "path-fox"
    assert not any("angle_factor" in name for name in model.state_dict())
    for (name, found), (_, expected) in zip(
        model.model.layers[0].mlp.named_parameters(), source.model.layers[0].mlp.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name
    assert not torch.equal(
        model.model.layers[0].self_attn.q_proj.weight, source.model.layers[0].self_attn.q_proj.weight
    )
    assert AutoTokenizer.from_pretrained(out)("a bell rang").input_ids
    report = json.loads((out / "report.json").read_text())
    assert list(report["student"]["perplexity"]["held out"]) == ["32", "64", "128", "256", "512"]
    assert 0 <= report["same_tokens"] <= 1
    card = (out / "README.md").read_text()
    assert "| align | 30 |" in card and "base_model:" in card
    faded = [load_start(str(out / stage / "last")).state_dict() for stage in ("align", "distil")]
    assert all(weights["model.layers.1.self_attn.encoding.turns.angle_factor"] == 0 for weights in faded)
    assert all(weights["model.layers.1.self_attn.encoding.turns.new_factor"] == 1 for weights in faded)
    assert Run(out / "extend").recipe.length == 128
    starts = [Run(out / stage).recipe.start for stage in ("align", "distil", "extend")]
    assert starts == [str(out / place) for place in ("start", "align/last", "distil/last")]
    page = tmp_path / "page.md"
    assert run_cli(monkeypatch, "report", str(out), "-o", str(page)) == 0
    capsys.readouterr()
    loss = {name: mean(report[name]["texts"]["held out"]["512"]) for name in ("teacher", "start", "student")}
    assert loss["start"] == pytest.approx(loss["teacher"], abs=1e-4)
    assert loss["student"] == pytest.approx(math.log(report["student"]["perplexity"]["held out"]["512"]))
    rows = dict(row[2:].split(" | ", 1) for row in page.read_text().splitlines() if row.startswith("| converted"))
    assert rows["converted, end"].endswith(f"{loss['student']:.4f} |")
    assert f"| {loss['student'] - loss['teacher']:+.4f} |" in page.read_text()  # one text has no standard error
    assert "Loss by length on one held-out text, nats:" in page.read_text() and "nan" not in page.read_text()
    assert f"| `{other}` | 1,234,568 | {mean(report['teacher']['texts']['held out']['32']):.4f} |" in page.read_text()
    assert page.with_suffix(".png").exists()
    course = next(row for row in page.read_text().splitlines() if row.startswith("| converted | align | 2 |"))
    at_last = [one["texts"] for one in Run(out / "align").lines("evaluations")[-1]["scores"]]
    assert course.endswith(f" {mean(at_last[0]) - mean(report['teacher']['at_length']['held out']):+.4f} at 3,840 |")
    check_courses_beside(monkeypatch, out, other, page)
    capsys.readouterr()
    with monkeypatch.context() as patch:  # nothing is trained or measured again
        patch.setattr("deadreckon.lab.pages.conversion.measure", lambda *_: pytest.fail("measured again"))
        assert run_cli(patch, *words) == 0
    assert json.loads((out / "report.json").read_text()) | {"environment": 0} == report | {"environment": 0}
    assert "step" not in capsys.readouterr().out
    assert run_cli(monkeypatch, *words[:-2], "align.steps=31") == 2
    assert "another recipe" in capsys.readouterr().err


def check_courses_beside(monkeypatch: pytest.MonkeyPatch, out: Path, other: Path, page: Path) -> None:
    """The training of a model beside a conversion is on its page, if the model was tested alike."""
    expected = json.loads((out / "report.json").read_text())["teacher"]["at_length"]["held out"]
    recipe = json.loads((out / "align" / "recipe.json").read_text())
    scores = [{"condition": "held out", "length": 32, "texts": [loss + 0.5 for loss in expected]}]
    line = {"step": 2, "scores": scores}
    (other.parent / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    for tokens, shown in ((recipe["test_tokens"], True), (2 * recipe["test_tokens"], False)):
        (other.parent / "recipe.json").write_text(json.dumps(recipe | {"test_tokens": tokens}))
        assert run_cli(monkeypatch, "report", str(out), "-o", str(page)) == 0
        row = f"| `{other}` | training | 1 | +0.5000 ± 0.0000 at 617,284 |"
        assert (row in page.read_text()) == shown


def test_several_kinds_of_held_out_text(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a folder of tokens: progress shows the gap on each, the page has its tables, the card its columns."""
    monkeypatch.setattr("deadreckon.lab.pages.conversion.NEW", 4)
    monkeypatch.setattr("deadreckon.lab.training.display.QUIET", 0.0)
    tokenizer, chance, tokens = fast_tokenizer(str(teacher / "llama")), random.Random(1), tmp_path / "tokens"
    for name, words in (("bells", WORDS), ("letters", "q w x z k j v f g h")):
        documents = [" ".join(chance.choices(words.split(), k=400)) for _ in range(3)]
        write_ids(tokens / f"{name}.npy", documents, tokenizer, name)
    write_ids(tokens / "train.npy", read_documents(teacher / "train.jsonl"), tokenizer, "train")
    tokenizer.save(str(tokens / "tokenizer.json"))
    conditions = {name: {"part": name} for name in ("bells", "letters")}
    changes = (*SMALL, "test_tokens=1024", "evaluate_every=2", "steps=4", "learning_rate=0.01", "extend.batch_size=1")
    plan = conversion(
        teacher, data=str(tokens), held_out="", changes=(*changes, f"conditions={json.dumps(conditions)}")
    )
    console, out, page = quiet(), tmp_path / "converted", tmp_path / "page.md"
    convert(plan, out, "cpu", console)
    write_conversions(page, [out], quiet())
    assert isinstance(console.file, io.StringIO)
    gap = r"[+-]\d\.\d{4} nats at length 32 \((bells|letters)\)"
    shown = re.findall(rf"step 4/4.* gap to the teacher {gap}, {gap}", console.file.getvalue())
    assert shown == [("bells", "letters")]
    text, card = page.read_text(), (out / "README.md").read_text()
    report, recipe = json.loads((out / "report.json").read_text()), plan.test_recipe()
    models = {"teacher": load_teacher(plan.source), "converted, end": load_start(str(out))}
    for name, model in models.items():
        scores = {one.place: one for one in evaluate(model.eval(), recipe)}
        for condition in conditions:
            place, about = (condition, 512), f"Loss by length on the same 2 held-out texts ({condition}), nats:"
            rows = text.partition(about)[2].split("\n\n")[1].splitlines()
            assert next(row for row in rows if name in row).endswith(f"| {scores[place].loss:.4f} |")
        assert scores["bells", 512].loss != pytest.approx(scores["letters", 512].loss, abs=0.01)
    assert "perplexity (bells) at 32 |" in card and "perplexity (letters) at 512 |" in card and "16 × 4" in card
    at_last = {one["condition"]: one["texts"] for one in Run(out / "extend").lines("evaluations")[-1]["scores"]}
    for condition in conditions:
        _, _, below = text.partition(f"Loss at 32 less the teacher's on the same tokens ({condition}), nats, by tokens")
        expected = mean(at_last[condition]) - mean(report["teacher"]["at_length"][condition])
        row = next(row for row in below.splitlines() if row.startswith("| converted | extend | 2 |"))
        assert row.endswith(f"{expected:+.4f} at 512 |")
    with pytest.raises(ValueError, match="part: expected one of bells, letters, train; got 'valid'"):
        convert_run(conversion(teacher, data=str(tokens)), tmp_path / "other", console=quiet())


def test_a_run_without_its_last_checkpoint_has_no_course(tmp_path: Path) -> None:
    """As of a teacher of which the best checkpoint alone was kept."""
    conversion = {"source": str(tmp_path / "best"), "length": 32}
    report = {"teacher": {"at_length": {"as trained": [1.0, 2.0]}}, "conversion": conversion}
    (tmp_path / "recipe.json").write_text(json.dumps(Recipe(task="language").to_dict()))
    line = {"step": 2, "scores": [{"condition": "as trained", "length": 32, "texts": [1.5, 2.5]}]}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    converted = Converted("converted", report, [Run(tmp_path)])
    assert converted.courses("as trained") == {("converted", tmp_path.name): []}
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "progress.json").write_text('{"step": 4, "tokens": 100}')
    assert converted.courses_beside("as trained") == {("teacher", "training"): [(50, 0.5, 0.0)]}


def test_what_was_measured_is_kept(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until weights, tests or the device change."""
    plan, loaded, folder = conversion(teacher), list[str](), tmp_path / "model"
    monkeypatch.setattr("deadreckon.lab.pages.conversion.measure", lambda *_: {"texts": {"held out": {32: [0.1]}}})
    monkeypatch.setattr("deadreckon.lab.pages.conversion.continue_greedily", lambda *_: (torch.ones(1, 2), 3.0))
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")

    def load(name: str) -> torch.nn.Module:
        loaded.append(name)
        return torch.nn.Module()

    for _ in range(2):
        found = measured_once(folder, load, plan, tmp_path, "cpu")
        assert found == {"texts": {"held out": {"32": [0.1]}}, "writing": 3.0, "written": [[1.0, 1.0]]}
        assert loaded == [str(folder)]
    measured_once(folder, load, replace(plan, length=16), tmp_path, "cpu")
    (folder / "model.safetensors").write_bytes(b"others!")
    assert len(loaded) == 2
    for _ in range(2):
        measured_once(folder, load, replace(plan, length=16), tmp_path, "cpu")
        assert len(loaded) == 3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_checkpoints_of_transformers_through_all_stages(
    kind: str, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What save_pretrained wrote, half precision and tied embeddings or QK-norm included, with RoPE to the end."""
    monkeypatch.setattr("deadreckon.lab.pages.conversion.NEW", 4)
    torch.manual_seed(0)
    source: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=270, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, vocab_size=270, head_dim=24)),
    }[kind]()
    folder, out, page = tmp_path / kind, tmp_path / "converted", tmp_path / "page.md"
    source.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher / "llama").save_pretrained(folder)
    words = [
        "convert", str(folder), "--encoding", "rope-path-fox", "--data", str(teacher / "train.jsonl"), "--held-out",
        str(teacher / "valid.jsonl"), "--out", str(out), "--length", "32", "--stages", "align,distil,extend",
        "--change", *SMALL, "steps=3", "learning_rate=0.003",
    ]  # fmt: skip
    assert run_cli(monkeypatch, *words) == 0
    assert run_cli(monkeypatch, "report", str(out), "-o", str(page)) == 0
    ids = torch.randint(1, 270, (2, 100), generator=torch.Generator().manual_seed(0))
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    source, start, end = (load(place).eval() for place in (folder, out / "start", out))
    with torch.no_grad():
        expected, found, learnt = (model(ids).logits for model in (source, start, end))
    assert (found - expected).abs().max() < 1e-4 * (expected.max() - expected.min())
    assert (learnt - expected).abs().max() > 1e-2 * (expected.max() - expected.min())
    assert isinstance(end, dr.DeadReckonForCausalLM) and end.config.encoding == "rope-path-fox"
    assert end.config.qk_norm == (kind == "qwen3") and end.config.tie_word_embeddings == (kind == "llama")
    prompt = AutoTokenizer.from_pretrained(out)("a bell rang", return_tensors="pt")
    assert end.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape[1] == prompt["input_ids"].shape[1] + 2
    report = json.loads((out / "report.json").read_text())
    found, expected = (report[name]["texts"]["held out"]["512"] for name in ("start", "teacher"))
    assert found == pytest.approx(expected, abs=1e-4)
    stages = [row.split(" | ")[1] for row in page.read_text().splitlines() if row.startswith("| converted | ")]
    assert {"align", "distil", "extend"} <= set(stages)


def test_the_start_is_exact_and_stages_close_the_gap(teacher: Path, tmp_path: Path) -> None:
    windows = 'evaluators=["perplexity", "perplexity-window"]'  # the report is about the former
    exact = conversion(teacher, stages=(), changes=(*SMALL, windows))
    convert_run(exact, tmp_path / "exact", console=quiet())
    batch = Batch(*exact.test_recipe().make_task().sample(4, 64, torch.Generator().manual_seed(1)))
    expected, source = load_teacher(exact.source), LlamaForCausalLM.from_pretrained(exact.source)
    logits = source(batch.tokens).logits
    assert (expected(batch.tokens).logits - logits).abs().max() < 1e-4 * (logits.max() - logits.min())
    shutil.copytree(teacher / "llama", tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds another conversion: source '.*', not '.*'; seed 0, not 1"):
        convert_run(replace(exact, source=str(tmp_path / "other"), seed=1), tmp_path / "exact", console=quiet())
    other = replace(exact, held_out=str(teacher / "train.jsonl"), length=16)
    found = [score_before(plan, tmp_path / "exact", "cpu")["teacher"][0] for plan in (exact, other, exact)]
    assert [one.length for one in found] == [32, 16, 32]
    assert found[0].loss == found[2].loss != found[1].loss
    start = load_start(str(tmp_path / "exact"))
    for objective in OBJECTIVES.values():
        assert abs(objective(start, expected, batch)) < 1e-6
    budget = (*SMALL, "align.steps=40", "distil.steps=40", "learning_rate=0.01")
    cold = conversion(teacher, encoding="path-fox", cold=True, changes=budget)
    convert_run(cold, tmp_path / "cold", console=quiet())
    gaps = {}
    for folder in ("start", "align/last", "distil/last"):
        model = load_start(str(tmp_path / "cold" / folder))
        gaps[folder.split("/")[0]] = [objective(model, expected, batch).item() for objective in OBJECTIVES.values()]
    assert gaps["align"][0] < 0.8 * gaps["start"][0]
    assert gaps["distil"][1] < 0.8 * gaps["align"][1] < gaps["start"][1]


@pytest.mark.parametrize("scored", [1, 0])
def test_parts_of_a_batch_without_scored_tokens(scored: int, teacher: Path, tmp_path: Path) -> None:
    """They add nothing, and a batch of them alone changes nothing but what AdamW keeps and decays."""
    cold = conversion(teacher, encoding="path-fox", cold=True, stages=(), changes=(*SMALL, "steps=4", "accumulate=2"))
    convert_run(cold, tmp_path, console=quiet())
    ((_, recipe),) = replace(cold, stages=("distil",)).recipes(tmp_path)
    training, _ = Run.create(tmp_path / "run", recipe).restore("cpu")
    assert isinstance(training, Training) and training.teacher is not None
    tokens = torch.randint(0, 260, (2, 20), generator=torch.Generator().manual_seed(0))
    silent = torch.full_like(tokens, -100)
    some = Batch(tokens, tokens if scored else silent)
    expected = OBJECTIVES["distil"](training.model, training.teacher, some).detach()
    assert (expected > 0.01) == bool(scored)
    loss, _ = training._step(some, Batch(tokens, silent))
    torch.testing.assert_close(loss, expected)
    gradients = [parameter.grad for parameter in training.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


def expected_source(teacher: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(teacher / "llama")


def test_accumulated_steps_and_resumed_ones_are_the_same(teacher: Path, tmp_path: Path) -> None:
    cold = conversion(teacher, encoding="path-fox", cold=True, stages=(), changes=(*SMALL, "steps=4"))
    convert_run(cold, tmp_path, console=quiet())
    plan = replace(cold, stages=("distil",))
    ((_, recipe),) = plan.recipes(tmp_path)
    losses = []
    for accumulate in (1, 2):
        varied = replace(recipe, accumulate=accumulate)
        training, _ = Run.create(tmp_path / str(accumulate), varied).restore("cpu")
        losses.append([training.advance().loss for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    run = Run.create(tmp_path / "halved", recipe)
    training, progress = run.restore("cpu")
    first = [training.advance().loss for _ in range(2)]
    run.save(training, replace(progress, step=2))
    again, _ = run.restore("cpu")
    assert isinstance(again, Training)
    assert first + [again.advance().loss for _ in range(2)] == losses[0]


def test_progress_shows_the_gap_to_the_teacher(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every stage, also of next tokens: the last that is known, from the exact start's on."""
    monkeypatch.setattr("deadreckon.lab.training.display.QUIET", 0.0)
    changes = (*SMALL, "evaluate_every=3", "steps=6", "learning_rate=0.01", "extend.batch_size=1")
    plan = conversion(teacher, stages=("distil", "extend"), changes=changes)
    advance = Training.advance

    def fail(training: Training) -> Step:
        if training.recipe.objective == "next-token" and training.done == 4:
            raise RuntimeError("no power")
        return advance(training)

    shown = []
    for attempt in (fail, advance):
        monkeypatch.setattr(Training, "advance", attempt)
        console = quiet()
        with pytest.raises(RuntimeError, match="no power") if attempt is fail else nullcontext():
            convert_run(plan, tmp_path, console=console)
        assert isinstance(console.file, io.StringIO)
        shown.append(re.findall(r"(distil|extend): step (\d).* gap to the teacher (\S+) nats at length 32,",
                                console.file.getvalue()))  # fmt: skip
    expected = mean_loss(plan, load_teacher(plan.source))
    known = {"start": mean_loss(plan, load_start(str(tmp_path / "start"))) - expected}
    for stage in ("distil", "extend"):
        for line in Run(tmp_path / stage).lines("evaluations"):
            known[f"{stage} {line['step']}"] = line["scores"][0]["loss"] - expected
    after = ["start"] * 3 + ["distil 3"] * 3 + ["distil 6"] * 3 + ["extend 3"]
    assert [(stage, int(step)) for stage, step, _ in shown[0]] == [
        *(("distil", step) for step in range(1, 7)), *(("extend", step) for step in range(1, 5)),
    ]  # fmt: skip
    assert [float(gap) for _, _, gap in shown[0]] == pytest.approx([known[one] for one in after], abs=6e-5)
    assert shown[0][0][2] in ("+0.0000", "-0.0000") and known["extend 3"] != pytest.approx(known["distil 6"], abs=1e-3)
    assert shown[1] == [("extend", str(step), shown[0][-1][2]) for step in (4, 5, 6)]  # step 4 was not saved


def mean_loss(plan: Conversion, model: dr.DeadReckonForCausalLM) -> float:
    """On the held-out texts that stages are scored on."""
    return next(iter(evaluate(model.eval(), replace(plan.test_recipe(), test_lengths=(plan.length,))))).loss


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoding": "path-fox", "stages": ()},
            "encoding: 'path-fox' cannot begin with the model's logits: it has no r",
        ),
        ({"stages": ("heal",)}, "stages: expected some of align, distil, extend; got 'heal'"),
        ({"drop_rope": True, "stages": ()}, "drop_rope: expected a stage"),
        ({"drop_rope": True, "cold": True}, "drop_rope: expected it without cold"),
        ({"drop_rope": True, "changes": (*SMALL, "steps=1")}, "align.steps: expected more, .* got 1"),
        ({"drop_rope": True, "encoding": "rope-values"}, "drop_rope: expected to end with path-fox, path or fox, got"),
        (
            {"drop_rope": True, "encoding": "alibi"},
            "drop_rope: expected to end with path-fox, path or fox, got 'alibi'",
        ),
        ({"stages": ("align", "align")}, "stages: expected each once, got align, align"),
        ({"length": 0}, "length: expected 1 or more, got 0"),
        ({"freeze": ("mpl",)}, "freeze: expected part of a parameter's name, such as mlp, got 'mpl'"),
        ({"freeze": ("model", "lm_head")}, "freeze: expected to leave something to train"),
        ({"held_out": ""}, "options.held_out: expected a text to test on"),
        ({"source": "nowhere"}, "model: expected a folder with config.json"),
    ],
)
def test_bad_conversions(changes: dict[str, Any], message: str, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert_run(conversion(teacher, **changes), tmp_path, console=quiet())
    assert not (tmp_path / "before.json").exists()  # before anything that takes time


def test_pages_are_of_conversions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs: expected folders of finished conversions"):
        write_conversions(tmp_path / "page.md", [tmp_path], quiet())


def test_tokenizers_are_checked(teacher: Path, tmp_path: Path) -> None:
    expected_source(teacher).save_pretrained(tmp_path / "mute")
    with pytest.raises(ValueError, match="model: expected a tokenizer beside the model"):
        convert_run(conversion(teacher, source=str(tmp_path / "mute")), tmp_path / "out", console=quiet())
    tokens = tmp_path / "tokens"
    make_corpora(tokens, {part: partial(read_documents, teacher / "valid.jsonl") for part in ("train", "valid")}, 265)
    with pytest.raises(ValueError, match="data: expected text, or tokens of the model's tokenizer, got others in"):
        convert_run(conversion(teacher, data=str(tokens)), tmp_path / "out", console=quiet())
    small = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=50)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"tokenizer: expected at most 50 tokens, the vocabulary of .*small, got"):
        convert_run(conversion(teacher, beside=(str(tmp_path / "small"),)), tmp_path / "out", console=quiet())
    for_transformers(train_tokenizer(teacher / "valid.jsonl", 300)).save_pretrained(tmp_path / "mute")
    with pytest.raises(ValueError, match=r"tokenizer: expected at most 270 tokens, the vocabulary of .*, got"):
        convert_run(conversion(teacher, source=str(tmp_path / "mute")), tmp_path / "out", console=quiet())
