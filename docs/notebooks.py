"""Runs the notebooks in docs/notebooks and saves what their cells print and plot: `python docs/notebooks.py`.

Neither a kernel nor Jupyter is needed: cells run as plain Python, and their outputs are standard output, the value of a
last line that is an expression, and matplotlib's figures. `as_markdown` converts a notebook for the site.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Runs all cells in one namespace, fills in their outputs, and returns the namespace."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    pyplot.close("all")  # figures that are open are not the notebook's
    names: dict[str, Any] = {"__name__": "__main__"}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, start=1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = _value_of("".join(cell["source"]), names)
        shown = [{"output_type": "stream", "name": "stdout", "text": printed.getvalue()}] if printed.getvalue() else []
        if value is not None:
            data = {"text/plain": repr(value)}
            if hasattr(value, "_repr_png_"):
                data["image/png"] = base64.b64encode(value._repr_png_()).decode()
            result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
            shown.append(result)
        cell["execution_count"], cell["outputs"] = number, [*shown, *_figures()]
    return names


def _value_of(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; returns the value of its last line, if that is an expression and no semicolon hides it."""
    tree = ast.parse(source)
    shown = bool(tree.body) and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    last = tree.body.pop() if shown else None
    exec(compile(tree, "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def _figures() -> list[dict[str, Any]]:
    """Collects and closes matplotlib's open figures."""
    from matplotlib import pyplot

    shown = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, dpi=110, bbox_inches="tight")
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "<Figure>"}
        shown.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return shown


def as_markdown(notebook: dict[str, Any]) -> str:
    """Text as it is, code in fences, followed by what was printed and plotted."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                parts.append(f"![drawn by the cell above](data:image/png;base64,{data['image/png']})")
            else:
                parts.append("```text\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        content = json.loads(path.read_text())
        run(content)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        print(path)
