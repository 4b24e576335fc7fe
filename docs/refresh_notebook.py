"""Runs the cells of docs/notebook.ipynb and writes what they show into it.

Outputs that differ from those of the notebook in seconds alone stay. ``python
docs/refresh_notebook.py``; with ``--print`` the file is left alone.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same notebook with the outputs of its code cells, run in order from the root."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    with contextlib.chdir(ROOT):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                outputs = _outputs("".join(cell["source"]), names, count)
                if _lasting(outputs) != _lasting(cell["outputs"]):
                    cell = cell | {"outputs": outputs, "execution_count": count}
            cells.append(cell)
    return notebook | {"cells": cells}


def _lasting(outputs: list[dict[str, Any]]) -> str:
    """What a second run shows again."""
    return re.sub(r"\b[\d.]+ m?s\b", "# s", json.dumps(outputs))


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What a cell prints, then the value of its last line, as a notebook stores them."""
    tree = ast.parse(source)
    names["_shown"] = None
    if isinstance(last := tree.body[-1], ast.Expr):
        target = ast.Name("_shown", ast.Store())
        tree.body[-1] = ast.fix_missing_locations(
            ast.copy_location(ast.Assign([target], last.value), last)
        )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if (shown := names["_shown"]) is not None:
        data = {"text/plain": lines(repr(shown))}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = lines(shown._repr_html_())
        result = {"data": data, "execution_count": count, "metadata": {}}
        outputs.append(result | {"output_type": "execute_result"})
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    notebook = executed(json.loads(NOTEBOOK.read_text("utf-8")))
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        NOTEBOOK.write_text(text, encoding="utf-8")
