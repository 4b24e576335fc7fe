"""Writes the table of docs/families.md from the family files: `python docs/refresh_families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moegeom.router.describe import describe_families
from moegeom.router.family import Family, TensorName
from moegeom.router.family_file import families, load_family

PAGE = Path(__file__).with_name("families.md")
BEGIN = "<!-- the table is written by docs/refresh_families.py -->"


def families_page(before: str) -> str:
    """The page with its table renewed."""
    head = before.partition(BEGIN)[0]
    return head + BEGIN + "\n\n" + "\n".join(_table()) + "\n"


def _table() -> Iterator[str]:
    yield "| family | model types | router weight, without prefix | rule | checked against |"
    yield "|---|---|---|---|---|"
    said = {row["family"]: row for row in describe_families()}
    for name in families():
        family = load_family(name)
        row = said[name]
        rule = f"not loaded: {reason}" if (reason := _reason(family)) else row["rule"]
        cells = (name, row["model types"], _names(family), rule, row["checked against"])
        yield "| " + " | ".join(cells) + " |"


def _reason(family: Family) -> str:
    return next((stack.not_a_function for stack in family.stacks if stack.not_a_function), "")


def _names(family: Family) -> str:
    spelled = [_spelled(tensor) for stack in family.stacks for tensor in stack.weight]
    return "<br>".join(dict.fromkeys(spelled))


def _spelled(tensor: TensorName) -> str:
    return f"`{tensor.name}`" + ("" if tensor.layout == "rows" else f" ({tensor.layout})")


if __name__ == "__main__":
    PAGE.write_text(families_page(PAGE.read_text("utf-8")), encoding="utf-8")
