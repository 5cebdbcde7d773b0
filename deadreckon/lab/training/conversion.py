"""Runs a conversion: the start, its stages as training runs, and the final model, in one folder.

    OUT/start                  the model before training
    OUT/start/conversion.json  what it was converted from
    OUT/before.json            scores of teacher and start, in the tests that the student has during training
    OUT/align, OUT/distil, …   runs, as `deadreckon train` makes them
    OUT                        the final model for from_pretrained, and its tokenizer

If killed, run the same command again: it resumes, and finished stages are used as they are.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import deadreckon as dr
from deadreckon.lab.environment import check_device, check_model, fingerprint, quiet_transformers
from deadreckon.lab.evaluation import Score, evaluate
from deadreckon.lab.files import recover, replacing, write_text
from deadreckon.lab.recipes.conversion import Conversion
from deadreckon.lab.recipes.texts import fast_tokenizer
from deadreckon.lab.training.display import Gap
from deadreckon.lab.training.distillation import freeze, load_source, load_start, load_teacher
from deadreckon.lab.training.ranks import processes
from deadreckon.lab.training.trainer import train_run
from deadreckon.tasks.language import Language

MADE_OF = "conversion.json"
ROPE_OPTIONS = ("base", "scaling", "learn_factor")


def convert_run(conversion: Conversion, out: Path, *, device: str = "cpu", console: Console | None = None) -> Path:
    """Converts a model, or resumes; returns the folder of the last checkpoint."""
    if (started := processes()) > 1:
        raise ValueError(f"convert: expected one process, as a teacher and its student need it, got {started}")
    console = console or Console()
    check_device(device)
    begun = (out / "start").exists() and out.resolve() != Path(conversion.source).resolve()
    if (out / "config.json").exists() and not begun:
        raise ValueError(f"out: expected a new folder, or one of this conversion, got {str(out)!r} with a model in it")
    with quiet_transformers():
        check_vocabulary(conversion)
        recipes = list(conversion.recipes(out))  # so that bad ones fail before anything is written
        make_start(conversion, out / "start", console)
        if not conversion.departs and {"align", "distil"} & {stage for stage, _ in recipes}:
            console.print("An exact start has nothing to learn from its teacher: align and distil add noise alone.")
        with console.status(f"scoring {conversion.source} and {out / 'start'}"):
            before = score_before(conversion, out, device)
        latest, gap = out / "start", Gap(before["teacher"])
        gap.note(before["start"])
        for stage, recipe in recipes:
            train_run(recipe, out / stage, device=device, console=console, gap=gap)
            latest = out / stage / "last"
        model = load_start(str(latest))
        if conversion.drop_rope:
            model = without_rope(model, conversion.ended)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(conversion.source).save_pretrained(out)
    return latest


def check_vocabulary(conversion: Conversion) -> None:
    """Raises ValueError unless the tokenizer fits the vocabularies of all models, and is the one that texts use."""
    check_model(Path(conversion.source), ours=False)
    tokenizer = fast_tokenizer(conversion.source)
    for folder in (conversion.source, *conversion.beside):
        check_model(Path(folder), ours=False)
        known = AutoConfig.from_pretrained(folder).vocab_size
        if (tokens := tokenizer.get_vocab_size()) > known:
            raise ValueError(f"tokenizer: expected at most {known} tokens, the vocabulary of {folder}, got {tokens}")
    recipe = conversion.test_recipe()
    for task in (recipe.make_task(), *map(recipe.make_task, recipe.conditions)):
        assert isinstance(task, Language)
        if task.corpus.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"data: expected text, or tokens of the model's tokenizer, got others in {conversion.data}"
            )


def make_start(conversion: Conversion, folder: Path, console: Console) -> None:
    """Saves the model that training starts from, unless it exists, and prints its difference to the teacher."""
    recover(folder)
    made_of = {"source": conversion.source, "encoding": conversion.begun, "cold": conversion.cold}
    made_of |= {"drop_rope": conversion.drop_rope, "seed": conversion.seed}
    made_of |= {"weights": fingerprint(Path(conversion.source))}
    if (folder / MADE_OF).exists():
        was = json.loads((folder / MADE_OF).read_text())
        if differences := [
            f"{name} {was.get(name)!r}, not {value!r}" for name, value in made_of.items() if was.get(name) != value
        ]:
            raise ValueError(f"out: {folder.parent} holds another conversion: {'; '.join(differences)}")
        return
    torch.manual_seed(conversion.seed)
    source = load_source(conversion.source)
    student = dr.convert_model(source, conversion.begun, exact=not conversion.departs)
    freeze(student, conversion.freeze)  # bad ones fail before anything is written or scored
    if conversion.drop_rope:
        for name, factor in student.named_buffers():
            if name.endswith(".new_factor"):
                factor.zero_()
    with replacing(folder) as new:
        student.save_pretrained(new)
        AutoTokenizer.from_pretrained(conversion.source).save_pretrained(new)
        (new / MADE_OF).write_text(json.dumps(made_of) + "\n")
    rows = conversion.sample_tests(1, 64)
    off = difference(student, load_teacher(conversion.source), rows)
    console.print(f"{folder}: logits {off:.1e} of their range off the source's", highlight=False, soft_wrap=True)


def score_before(conversion: Conversion, out: Path, device: str) -> dict[str, list[Score]]:
    """Scores of "teacher" and "start" at the training length, in the tests of the stages; cached in before.json."""
    path, recipe = out / "before.json", replace(conversion.test_recipe(), test_lengths=(conversion.length,))
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("recipe") != recipe.to_dict():
        scores = dict[str, Any]()
        for name, folder, load in (("teacher", conversion.source, load_teacher), ("start", out / "start", load_start)):
            model = load(str(folder)).to(device).eval()
            scores[name] = [asdict(one) for one in evaluate(model, recipe)]
        kept = {"recipe": recipe.to_dict(), "scores": scores}
        write_text(path, json.dumps(kept) + "\n")
    return {name: [Score(**one) for one in found] for name, found in kept["scores"].items()}


@torch.no_grad()
def difference(student: dr.DeadReckonForCausalLM, teacher: dr.DeadReckonForCausalLM, rows: Tensor) -> float:
    """The greatest difference of logits, relative to their range."""
    logits, expected = student.eval()(rows).logits, teacher.eval()(rows).logits
    return float((logits - expected).abs().max() / (expected.max() - expected.min()))


def without_rope(model: dr.DeadReckonForCausalLM, encoding: str) -> dr.DeadReckonForCausalLM:
    """The same model without RoPE, whose angles must have faded to zero, with the encoding that is left."""
    weights, config = model.state_dict(), deepcopy(model.config)
    factors = [weights.pop(name) for name in list(weights) if name.endswith(".turns.angle_factor")]
    grown = [weights.pop(name) for name in list(weights) if name.endswith(".turns.new_factor")]
    if any(bool(factor != 1) for factor in grown):
        raise ValueError(f"drop_rope: expected factors of 1 on new parts, got {[float(one) for one in grown]}")
    if not factors or any(bool(factor) for factor in factors):
        raise ValueError(f"drop_rope: expected factors of 0 on all angles, got {[float(one) for one in factors]}")
    options = (config.encoding_options or {}).get(config.encoding, {})
    left = {name: value for name, value in options.items() if name not in ROPE_OPTIONS}
    config.encoding, config.encoding_options = encoding, {encoding: left} if left else None
    bare = dr.DeadReckonForCausalLM(config)
    bare.load_state_dict(weights)
    return bare
