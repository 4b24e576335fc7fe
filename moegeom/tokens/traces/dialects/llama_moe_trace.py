"""llama.cpp, ``llama-moe-trace``: a line ``layer,expert`` for each choice, and nothing else.

Lines stand as tensors were computed: a batch (the prompt, then each generated token), its layers,
its tokens, their k experts. k is the largest number that divides every run of one layer, since a
generated token is a batch of its own. The last layer is computed for those tokens alone whose
logits are wanted.

Versions that read the strided tensor as if it were contiguous wrote for a batch of several tokens
the ranking of all experts by its first token. Such batches are left out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from moegeom.core.errors import RecordingError
from moegeom.core.text import number_of
from moegeom.tokens.traces.dialects._csv_numbers import csv_numbers, first_lines
from moegeom.tokens.traces.trace import Dialect, RequestTrace, Trace

_NAMES = ("layer", "expert")

_LINE = re.compile(rb"\d{1,4},-?\d{1,7}")

#: A batch in which no expert stands twice is believed to be no accident below this probability.
_LOG10_ACCIDENT = -9.0


@dataclass(frozen=True, eq=False)
class _Batch:
    """Runs of ids by layer, in the order of the file."""

    layers: tuple[int, ...]
    ids: tuple[Int64[np.ndarray, "_"], ...]

    @property
    def num_tokens(self) -> int:
        """Numbers of the widest layer, in units of k."""
        return max(len(ids) for ids in self.ids)


def recognises(path: Path) -> bool:
    """True for lines of two whole numbers without a header."""
    lines = first_lines(path)
    return len(lines) > 1 and all(_LINE.fullmatch(line) for line in lines)


def read(path: Path) -> Trace:
    """All tokens in the order of the file, as one request."""
    found = csv_numbers(path, _NAMES)
    if not len(found) or np.abs(found).max() >= 2**31 or found[:, 0].min() < 0:
        raise RecordingError(
            f"{path.name}: {number_of(len(found), 'line')}; expected layers and experts."
        )
    batches = list(_batches(found))
    layers = batches[0].layers
    if any(batch.layers != layers for batch in batches):
        odd = next(batch.layers for batch in batches if batch.layers != layers)
        raise RecordingError(
            f"{path.name}: a batch has {number_of(len(odd), 'layer')}, the first {len(layers)}.",
            "The file was cut off, or lines are missing.",
        )
    top_k = math.gcd(*(len(ids) for batch in batches for ids in batch.ids))
    num_experts = int(found[:, 1].max()) + 1
    parts, rankings, uncomputed = [], 0, 0
    for batch in batches:
        if _is_ranking(batch, top_k, num_experts):
            rankings += 1
            continue
        rows = [ids.reshape(-1, top_k) for ids in batch.ids]
        num_rows, most = len(rows[-1]), batch.num_tokens // top_k
        if any(len(of_layer) != most for of_layer in rows[:-1]) or num_rows not in (1, most):
            raise RecordingError(
                f"{path.name}: layers of one batch have {sorted({len(r) for r in rows})} tokens of "
                f"{top_k} experts; expected as many, or 1 at the last.",
                "The file was cut off, or lines are missing.",
            )
        uncomputed += most - num_rows
        parts.append(np.stack([of_layer[-num_rows:] for of_layer in rows], axis=1))
    if not parts:
        raise RecordingError(
            f"{path.name}: {number_of(rankings, 'batch', 'batches')}, each the ranking of all "
            "experts by its first token, and no choices.",
            "This version of llama-moe-trace reads the choices of a prompt wrongly: generate "
            "tokens (-n), or take one that honours strides.",
        )
    said = (
        (rankings, "batches left out that rank all experts in place of choices"),
        (uncomputed, "tokens left out because the last layer was not computed for them"),
    )
    return Trace(
        path.name,
        "llama.cpp moe-trace",
        (RequestTrace("log", np.concatenate(parts).astype(np.int32), is_place=True),),
        layers=layers,
        ids_are="logical",
        has_documents=False,
        notes=tuple(f"{text}: {count:,}" for count, text in said if count),
    )


def _batches(found: Int64[np.ndarray, "lines columns"]) -> Iterator[_Batch]:
    """Runs of one layer, cut into batches where layers begin again."""
    layer = found[:, 0]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(layer) != 0]))
    again = np.concatenate([[True], np.diff(layer[starts]) < 0])
    runs = np.split(found[:, 1], starts[1:])
    bounds = [*np.flatnonzero(again).tolist(), len(starts)]
    for first, last in itertools.pairwise(bounds):
        yield _Batch(tuple(layer[starts[first:last]].tolist()), tuple(runs[first:last]))


def _is_ranking(batch: _Batch, top_k: int, num_experts: int) -> bool:
    """Whether the first numbers of every layer, up to one for each expert, are all different.

    Even rows of distinct experts drawn at random would do that with a probability that is too
    small to come by chance.
    """
    log10, is_even = 0.0, True
    for ids in batch.ids:
        seen = ids[:num_experts]
        num_rows = len(seen) // top_k
        if num_rows > 1:
            is_even &= len(np.unique(seen)) == len(seen)
            log10 += _log10_all_different(num_rows, top_k, num_experts)
    return is_even and log10 < _LOG10_ACCIDENT


def _log10_all_different(num_rows: int, top_k: int, num_experts: int) -> float:
    """log10 of the probability that random sets of k experts have none in common.

    The multinomial E! / (k!^n (E - n k)!) over the n-th power of the binomial of E and k.
    """
    e, k, n = num_experts, top_k, num_rows
    of_all = math.lgamma(e + 1) - n * math.lgamma(k + 1) - math.lgamma(e - n * k + 1)
    of_one = math.lgamma(e + 1) - math.lgamma(k + 1) - math.lgamma(e - k + 1)
    return (of_all - n * of_one) / math.log(10)


DIALECT = Dialect(
    name="llama_moe_trace",
    versions="llama.cpp PR 28544 as opened (0a5bc4d) and at 879f4d67a1 (2026-09)",
    source="examples/moe-trace/moe-trace.cpp (moe_cb); build_moe_ffn",
    recognises=recognises,
    read=read,
)
