"""Arithmetics: how an engine computes a router, as data (``arithmetics/<name>.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

from moegeom.core.errors import InternalError
from moegeom.core.registry import unknown_name
from moegeom.geometry.number_formats import NUMBER_FORMATS, WEIGHT_STORAGE
from moegeom.geometry.rounding import SUMMATION_ORDERS

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


#: What each field may hold, where that is not any text.
_KNOWN: Mapping[str, Collection[str]] = {
    "parameter": WEIGHT_STORAGE,
    "order": frozenset(SUMMATION_ORDERS),
    "compared": frozenset(get_args(Compared)),
    "ties": frozenset(get_args(Ties)),
    **dict.fromkeys(
        ("input", "operands", "output", "score", "bias", "selection"), frozenset(NUMBER_FORMATS)
    ),
}


def _presets() -> Traversable:
    return files("moegeom.variants") / "arithmetics"


def arithmetic_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    found = (entry.name for entry in _presets().iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in found))


@cache
def arithmetic(name: str) -> Arithmetic:
    """The preset of that name; UsageError with the nearest ones for an unknown name."""
    names = arithmetic_names()
    if name not in names:
        raise unknown_name("arithmetic", name, names)
    text = (_presets() / f"{name}.toml").read_text("utf-8")
    return _parsed(name, tomllib.loads(text))


def _parsed(name: str, found: Mapping[str, Any]) -> Arithmetic:
    """The record, or InternalError: these files are part of the program."""
    known = {field.name for field in fields(Arithmetic)} - {"name"}
    if not set(found) <= known:
        raise InternalError(f"arithmetic {name}: unknown fields {sorted(set(found) - known)}")
    wrong = [key for key, allowed in _KNOWN.items() if key in found and found[key] not in allowed]
    if wrong:
        raise InternalError(f"arithmetic {name}: {wrong[0]} is {found[wrong[0]]!r}")
    return Arithmetic(name=name, **found)
