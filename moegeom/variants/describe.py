"""Arithmetics as rows of a listing."""

from __future__ import annotations

from moegeom.variants.arithmetic import Arithmetic, arithmetic, arithmetic_names

#: Steps in the order in which they happen, and the value that changes nothing.
_STEPS = {
    "parameter": "float64",
    "input": "float64",
    "operands": "float32",
    "order": "any",
    "output": "float32",
    "score": "float32",
    "bias": "float32",
    "selection": "float32",
}


def describe_arithmetics() -> list[dict[str, str]]:
    """A row for each preset, by name."""
    return [_row(arithmetic(name)) for name in arithmetic_names()]


def _row(how: Arithmetic) -> dict[str, str]:
    found = {step: getattr(how, step) for step in _STEPS}
    changed = [f"{step} {form}" for step, form in found.items() if form != _STEPS[step]]
    version = f" ({how.version})" if how.version else ""
    return {
        "name": how.name,
        "ties": how.ties,
        "engine": f"{how.engine}{version}",
        "text": how.text,
        "steps": ", ".join(changed),
        "source": how.source,
    }
