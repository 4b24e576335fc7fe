"""Numbers that are kept more coarsely: rows, inputs, logits, scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from moegeom.studies.faults.operator import AS_STORED, Candidate, Inputs, Operator, Site, routed

#: Formats of rows, in words, simplest first: as many bits for each as for naming one of them.
_ROWS = {
    "bfloat16": "router weights rounded to bf16",
    "float16": "router weights rounded to fp16",
    "int8_rows": "router weights int8 by row",
    "fp8_tensor": "router weights fp8, one scale",
    "fp8_blocks_of_128": "router weights fp8 by blocks",
    "int4_groups_of_128": "router weights int4, groups of 128",
}

#: Integers are also made with another scale, unsigned, and stored in bfloat16 afterwards.
_LARGEST = {"int8_rows": 127, "int4_groups_of_128": 7}

_ROWS_BITS = 5.0


def _formats() -> Iterator[tuple[str, str]]:
    yield from _ROWS.items()
    for name, largest in _LARGEST.items():
        text, other, unsigned = _ROWS[name], f"{name}_by_{largest}", f"u{name}"
        yield other, f"{text}, scale amax/{largest}"
        yield unsigned, f"{text}, unsigned"
        yield f"{name}_in_bfloat16", f"{text}, then bf16"
        yield f"{other}_in_bfloat16", f"{text}, amax/{largest}, then bf16"
        yield f"{unsigned}_in_bfloat16", f"{text}, unsigned, then bf16"


def _rows(site: Site) -> Iterator[Candidate]:
    for parameter, text in _formats():
        how = dataclasses.replace(AS_STORED, parameter=parameter)
        name = f"weights_{parameter}"
        yield from routed(
            site,
            name,
            text,
            "weights rounded",
            site.router,
            how,
            only_stores=True,
            bits=_ROWS_BITS,
        )


ROWS_ROUNDED = Operator("rows_rounded", _rows)

_BF16 = "bfloat16"


def _values(site: Site) -> Iterator[Candidate]:
    how = dataclasses.replace(AS_STORED, input=_BF16)
    inputs = "router inputs rounded to bf16"
    yield from routed(site, "inputs_bf16", inputs, "inputs rounded", site.router, how, bits=1.0)
    how = dataclasses.replace(how, parameter=_BF16)
    both = "inputs and weights rounded to bf16"
    yield from routed(site, "inputs_weights_bf16", both, "inputs rounded", site.router, how, bits=2)
    how = dataclasses.replace(how, output=_BF16)
    text = "inputs, weights and logits in bf16"
    yield from routed(site, "bf16_throughout", text, "logits rounded", site.router, how, bits=2)


def _in_eight_bits(site: Site) -> Iterator[Candidate]:
    """Inputs in eight bits: as they are, and with a scale for each token."""
    for form, name in ((ml_dtypes.float8_e4m3fn, "e4m3"), (ml_dtypes.float8_e5m2, "e5m2")):
        for way in ("plain", "by token"):
            scaled = "" if way == "plain" else ", a scale for each token"
            text = f"router inputs rounded to fp8 {name}{scaled}"
            yield from routed(
                site, f"inputs_{name}_{way}", text, "inputs rounded", site.router, bits=3.0,
                inputs=_cast_inputs(form, way == "by token"),
            )  # fmt: skip


def _cast_inputs(form: type, is_scaled: bool) -> Inputs:
    largest = float(ml_dtypes.finfo(form).max)

    def inputs(site: Site, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        scale = np.ones((len(values), 1), np.float32)
        if is_scaled:
            most = np.abs(values).max(axis=1, keepdims=True)
            scale = np.where(most > 0.0, most / np.float32(largest), np.float32(1.0))
        return (values / scale).astype(form).astype(np.float32) * scale

    return inputs


INPUTS_IN_EIGHT_BITS = Operator("inputs_in_eight_bits", _in_eight_bits)
INPUTS_ROUNDED = Operator("inputs_rounded", _values)


def _logits(site: Site) -> Iterator[Candidate]:
    cause = "logits rounded"
    for name, form, text in (
        ("logits_bf16", _BF16, "logits rounded to bf16"),
        ("logits_fp16", "float16", "logits rounded to fp16"),
    ):
        how = dataclasses.replace(AS_STORED, output=form)
        yield from routed(site, name, text, cause, site.router, how, needs_inputs=False, bits=1)
    if site.router.rule.score != "identity":
        how = dataclasses.replace(AS_STORED, score=_BF16, compared="scores")
        text = "scores rounded to bf16"
        yield from routed(
            site, "scores_bf16", text, cause, site.router, how, needs_inputs=False, bits=1
        )


LOGITS_ROUNDED = Operator("logits_rounded", _logits)
