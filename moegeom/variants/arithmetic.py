"""Arithmetics: how an engine computes a router, as data (``arithmetics/<name>.toml``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

from moegeom.core.documents import record_of_file, shipped_names, shipped_text
from moegeom.core.registry import unknown_name
from moegeom.core.text import quoted
from moegeom.geometry.number_formats import NUMBER_FORMATS, WEIGHT_STORAGE
from moegeom.geometry.rounding import SUMMATION_ORDERS

_PACKAGE = "moegeom.variants.arithmetics"

#: What each step can be, in the order in which they happen.
_STEPS: Mapping[str, Collection[str]] = {
    "parameter": WEIGHT_STORAGE,
    "input": NUMBER_FORMATS,
    "operands": NUMBER_FORMATS,
    "order": SUMMATION_ORDERS,
    **dict.fromkeys(("output", "score", "bias", "selection"), NUMBER_FORMATS),
}

Compared = Literal["logits", "scores"]
Ties = Literal["lowest", "undetermined"]


@dataclass(frozen=True)
class Arithmetic:
    """Formats and orders of one engine's router, step by step; ``engine`` is what it copies.

    ``parameter`` is how the rows are stored, ``input`` what the router input is rounded to,
    ``operands`` what the product rounds both to, ``order`` how a logit is added up in float32,
    ``output`` the format of logits, ``score`` and ``selection`` those of scores and of their sum
    with the selection bias, which is stored as ``bias``. ``compared`` is what top-k of an affine
    rule looks at. ``ties`` says whether equal scores go to the lowest expert, or to any.
    """

    name: str
    text: str
    engine: str
    version: str
    source: str
    parameter: str = "float64"
    input: str = "float64"
    operands: str = "float32"
    order: str = "any"
    output: str = "float32"
    compared: Compared = "scores"
    score: str = "float32"
    bias: str = "float32"
    selection: str = "float32"
    ties: Ties = "lowest"

    def __post_init__(self) -> None:
        for step, legal in _STEPS.items():
            if (name := getattr(self, step)) not in legal:
                raise ValueError(f"{step} is {quoted(name)}, expected one of {', '.join(legal)}")


def arithmetic_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return shipped_names(_PACKAGE)


@cache
def arithmetic(name: str) -> Arithmetic:
    """The preset of that name; UsageError with the nearest ones for an unknown name."""
    if name not in arithmetic_names():
        raise unknown_name("arithmetic", name, arithmetic_names())
    return record_of_file(Arithmetic, name, shipped_text(_PACKAGE, name))


def describe_arithmetics() -> list[dict[str, str]]:
    """A row for each preset, by name, with the steps that change something."""
    return [_row(arithmetic(name)) for name in arithmetic_names()]


def _row(how: Arithmetic) -> dict[str, str]:
    forms = {f: getattr(how, f.name) for f in fields(Arithmetic) if f.name in _STEPS}
    version = f" ({how.version})" if how.version else ""
    return {
        "name": how.name,
        "ties": how.ties,
        "engine": f"{how.engine}{version}",
        "text": how.text,
        "steps": ", ".join(f"{f.name} {form}" for f, form in forms.items() if form != f.default),
        "source": how.source,
    }
