"""How often each expert was chosen, in the layouts that expert load balancers take.

``rebalance_experts(weight=[layers, experts], ...)`` of DeepSeek's EPLB and of engines that took it
over reads such an array; vLLM's offline balancing (PR 41141) reads a line of statistics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from moegeom.core.errors import ResultsError, UsageError
from moegeom.core.extras import refuse_absent
from moegeom.core.files import write_whole
from moegeom.core.row_keys import ALL, AS_STORED
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of
from moegeom.results.reader import Results

#: What to do where a table is not as a scan writes it.
_AGAIN = "Scan again."


@dataclass(frozen=True, eq=False)
class ExpertCounts:
    """Chosen slots of each expert; ``routers`` names the rows, which are of one stack, by layer."""

    routers: tuple[str, ...]
    counts: Int64[np.ndarray, "layers experts"]


def expert_counts(results: Results) -> ExpertCounts:
    """The counts of the tokens of a scan, of the first stack of the checkpoint.

    A row sums to tokens times k, less the slots of tokens that had no finite input.

    Raises
    ------
    ResultsError
        When the results are of weights alone, or routers have different numbers of experts.
    """
    routers = results.run["routers"]
    stack = str(routers[0]["name"]).partition("/")[0]
    names = [r["name"] for r in routers if str(r["name"]).partition("/")[0] == stack]
    columns = ("router", "expert", "num_slots")
    cells = results.columns("experts", columns, variant=AS_STORED, population=ALL)
    rows = {name: dict[int, int]() for name in names}
    for router, expert, slots in zip(*(cells[name] for name in columns), strict=True):
        if router in rows and slots is not None:
            if not (_is_count(expert) and _is_count(slots)):
                raise ResultsError(
                    f"{results.name}: {slots!r} slots of expert {expert!r} of router {router}: "
                    "expected counts.",
                    _AGAIN,
                )
            rows[router][expert] = slots
    empty = [name for name, of_router in rows.items() if not of_router]
    if empty:
        raise ResultsError(
            f"{results.name}: no tokens were counted at router {empty[0]}.",
            "Weights alone do not say how often an expert is chosen: scan with --tokens.",
        )
    sizes = sorted({len(of_router) for of_router in rows.values()})
    if len(sizes) > 1:
        raise ResultsError(
            f"{results.name}: routers have {sizes[0]} to {sizes[-1]} experts; expected as many in "
            "every layer of one array.",
            "Scan layers of one size: --layers.",
        )
    odd = [n for n in names if not n.partition("/")[2].isdecimal() or max(rows[n]) >= sizes[0]]
    if odd:
        raise ResultsError(
            f"{results.name}: router {odd[0][:60]} lacks an expert or a layer.", _AGAIN
        )
    counts = [[rows[name][expert] for expert in range(sizes[0])] for name in names]
    return ExpertCounts(tuple(names), np.array(counts, np.int64))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def write_counts(counts: ExpertCounts, path: Path) -> str:
    """Writes the counts as the ending of ``path`` says, and gives back what was written, in words.

    ``.npy`` and ``.pt`` hold one array of 64-bit integers, ``.json`` nested lists, ``.jsonl`` a
    line as vLLM records it, for experts that lie in their order on one rank.

    Raises
    ------
    UsageError
        For another ending, and for ``.pt`` without torch.
    """
    refuse_ending(path)
    write_whole(path, _FORMS[path.suffix](counts.counts))
    layers, experts = counts.counts.shape
    return (
        f"counts of {number_of(layers, 'layer')} x {number_of(experts, 'expert')} "
        f"({counts.routers[0]} to {counts.routers[-1]})"
    )


def refuse_ending(path: Path) -> None:
    """Raises UsageError for what ``write_counts`` cannot write, before any work."""
    if path.suffix not in _FORMS:
        raise UsageError(f"--counts {path}: expected a name that ends in {', '.join(_FORMS)}.")
    if path.suffix == ".pt":
        refuse_absent("torch", "torch", "--counts FILE.pt")


def _npy(counts: Int64[np.ndarray, "layers experts"]) -> bytes:
    stream = BytesIO()
    np.save(stream, counts, allow_pickle=False)
    return stream.getvalue()


def _torch(counts: Int64[np.ndarray, "layers experts"]) -> bytes:
    import torch

    stream = BytesIO()
    torch.save(torch.from_numpy(counts), stream)
    return stream.getvalue()


def _lists(counts: Int64[np.ndarray, "layers experts"]) -> bytes:
    return json.dumps(counts.tolist()).encode() + b"\n"


def _statistics(counts: Int64[np.ndarray, "layers experts"]) -> bytes:
    layers, experts = counts.shape
    record = {
        "record_type": "eplb_load_stats",
        "version": 1,
        "step": 0,
        "num_ranks": 1,
        "expert_load": counts.tolist(),
        "p2l_map": [list(range(experts))] * layers,
    }
    return json.dumps(record).encode() + b"\n"


_FORMS: Mapping[str, Callable[[Int64[np.ndarray, "layers experts"]], bytes]] = {
    ".npy": _npy,
    ".pt": _torch,
    ".json": _lists,
    ".jsonl": _statistics,
}
