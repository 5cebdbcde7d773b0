"""The package from outside: cost and dependencies of importing it, and whether what the README says is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import deadreckon as dr

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_torch_alone() -> None:
    code = (
        "import sys, torch; print('triton' in sys.modules); "
        "import deadreckon as dr; q = torch.randn(1, 5, 2, 4); dr.attend(q, q, q); dr.AttentionLayer; "
        "unwanted = ('transformers', 'triton', 'safetensors', 'tyro', 'rich', 'matplotlib', 'deadreckon.lab', "
        "'deadreckon.models.huggingface', 'deadreckon.tasks'); "
        "before = set(sys.modules); print([m for m in unwanted if m in before]); "
        "import deadreckon.lab.recipes; print('transformers' in sys.modules)"
    )
    assert python(code).split() == ["False", "[]", "False"]  # torch alone brings no triton, a list of recipes no models


def test_a_reader_may_see_enough() -> None:
    """Piped into a program that has ended, the command line ends without a word."""
    command = f"{sys.executable} -m deadreckon --help | true"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert found.stderr == ""


def test_import_is_quick() -> None:
    code = (
        "import torch, time; began = time.process_time(); import deadreckon; deadreckon.attend; "
        "print(time.process_time() - began)"
    )
    assert any(float(python(code)) < 0.3 for _ in range(3))  # of the processor: others may be using it too


def test_attend_works_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; import torch, deadreckon as dr; "
        "q = torch.randn(1, 5, 2, 4); layer = dr.AttentionLayer(8, 2, 'path'); "
        "print(dr.attend(q, q, q).shape, layer(q.flatten(2)).shape)"
    )
    assert python(code) == "torch.Size([1, 5, 2, 4]) torch.Size([1, 5, 8])"


def test_public_names_are_there() -> None:
    assert set(dr.__all__) == set(dr._HOME)
    for name in dr.__all__:
        assert getattr(dr, name) is not None
    assert set(dr.__all__) <= set(dir(dr))


def test_readme_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    assert len([line for line in examples[0].splitlines() if line.strip()]) <= 8
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_readme_names_every_encoding() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in text for name in dr.ENCODINGS)


def test_class_variables_say_what_they_hold() -> None:
    """Python 3.10 evaluates no bare ClassVar, and transformers evaluates the annotations of models."""
    files = [
        path for path in (ROOT / "deadreckon").rglob("*.py") if re.search(r": ClassVar( =|$)", path.read_text(), re.M)
    ]
    assert files == []


def test_one_place_knows_whether_triton_is_there() -> None:
    files = [path for path in (ROOT / "deadreckon").rglob("*.py") if 'find_spec("triton")' in path.read_text()]
    assert files == [ROOT / "deadreckon" / "ops" / "triton" / "__init__.py"]
