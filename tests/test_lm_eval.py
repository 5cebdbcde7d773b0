"""Tasks for lm-evaluation-harness: their files refer to what exists, documents fit, and answers are scored."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from readers import read
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deadreckon.tasks.long import BABILONG, LONG_TASKS
from deadreckon.tasks.long.babilong import BabiLong

FOLDER = Path(__file__).parent.parent / "examples" / "lm_eval"


class Loader(yaml.SafeLoader):
    """YAML with functions, as their names."""


Loader.add_constructor("!function", lambda loader, node: f"function {loader.construct_scalar(node)}")  # type: ignore[arg-type]


def load_yaml(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader)


@pytest.fixture(scope="module")
def long() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long", FOLDER / "long.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_name_what_is_there(long: ModuleType) -> None:
    shared = load_yaml(FOLDER / "_long_yaml")
    functions = [value for value in shared.values() if str(value).startswith("function")]
    functions += [metric["aggregation"] for metric in shared["metric_list"]]
    assert all(hasattr(long, name.removeprefix("function long.")) for name in functions) and len(functions) > 8
    assert [metric["metric"] for metric in shared["metric_list"]] == [str(length) for length in long.LENGTHS]
    for name in (*LONG_TASKS, *BABILONG):
        task = load_yaml(FOLDER / f"dr_{name.replace('-', '_')}.yaml")
        one = LONG_TASKS[name]() if name in LONG_TASKS else BabiLong
        assert task["dataset_kwargs"]["name"] == name and task["task"] == f"dr_{name.replace('-', '_')}"
        assert task["include"] == "_long_yaml" and task["generation_kwargs"]["max_gen_toks"] == one.new_tokens
    assert load_yaml(FOLDER / "dr_long.yaml")["task"] == [f"dr_{name.replace('-', '_')}" for name in LONG_TASKS]


def test_documents_fit_and_are_scored(long: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_list=list)))
    documents = long.load("vt", pretrained=str(tmp_path), lengths=[1024, 2048], rows=2, version=1.0)["test"]
    assert [document["length"] for document in documents] == [1024, 1024, 2048, 2048]
    for document in documents:
        assert document["length"] - 48 < len(document["prompt"].split()) + 30 <= document["length"]
        names = read(document["prompt"])
        scores = long.process_results(document, [f" {names[0]} {names[3]}"])
        assert scores.pop(str(document["length"])) == pytest.approx(0.4) and set(scores.values()) == {-1}
    assert long.mean([-1, 0.5, 1, -1]) == 0.75 and long.mean([-1]) == -1
    with pytest.raises(ValueError, match=r"lengths: expected some of 1024, .*; got 1000"):
        long.load("vt", pretrained=str(tmp_path), lengths=[1000])
    with pytest.raises(ValueError, match="metadata: expected a tokenizer"):
        long.load("vt")
