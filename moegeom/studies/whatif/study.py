"""``moegeom whatif``: a scan in which other routers choose beside that of the checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moegeom.core.documents import DocumentError, parse_toml, refused_as
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import read_regular
from moegeom.core.limits import MOST_TOML
from moegeom.core.tokens import TILE
from moegeom.engine.plan import MAX_TILES
from moegeom.engine.session import Session
from moegeom.pipeline import Watch, scan
from moegeom.studies.whatif.record import WhatIfRequest
from moegeom.tokens.stages import INPUT_STAGES
from moegeom.variants.emulated import arithmetic
from moegeom.variants.what_if import parse_what_ifs

#: What-ifs at most.
MOST = 512
_FEWER = "Each is a pass over all tokens: ask for fewer."


def measure_what_ifs(request: WhatIfRequest, watch: Watch | None = None) -> Path:
    """The results directory, with every what-if as a variant.

    ``what_ifs`` are such as ``"smooth:extra=0.5"``, or several. ``checkpoint`` may be results of an
    earlier call. Results stay in memory, or are kept in the folder ``out``.

    Raises
    ------
    RecordingError
        When the recording does not hold the scores of all experts, or no inputs for arithmetics.
    UsageError
        Without tokens or what-ifs, for one that is not known, and for a batch that no scan is cut
        into.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> ckpt, rec = f"{sample}/step_1500", f"{sample}/rec/step_1500"
    >>> report = mg.whatif(ckpt, rec, what_ifs="topk:2", layers=0)
    >>> [(one.name, one.experts_mean) for one in report.value.what_ifs]
    [('topk:2', 2.0)]
    """
    what_ifs = (*request.what_ifs, *(() if request.grid is None else read_grid(request.grid)))
    if not what_ifs:
        raise UsageError(
            "whatif needs a what-if.",
            "Add --router smooth:extra=0.5, or another; `moegeom whatif --list` shows all.",
        )
    if len(parse_what_ifs(what_ifs)) > MOST:
        raise UsageError(f"whatif: more than {MOST} what-ifs.", _FEWER)
    for name in request.arithmetics:
        arithmetic(name)
    batch = request.what_if_batch
    if batch < 1 or (TILE % batch and batch % TILE) or batch > MAX_TILES * TILE:
        raise UsageError(
            f"--batch {batch}: expected a power of two up to {TILE:,}, or a multiple of that up to "
            f"{MAX_TILES * TILE:,}.",
            f"Leave it out for {TILE:,}.",
        )
    if request.tokens is None:
        raise UsageError(
            "whatif needs recorded tokens: which experts they choose is not in the weights.",
            "moegeom capture CKPT --text FILE --out REC, then add --tokens REC.",
        )
    opened = Session.open(request, with_varying=True)
    assert opened.source is not None, "there are tokens"
    facts = opened.source.facts
    holds = f"{facts.name}: holds {facts.stage.replace('_', ' ')}"
    if facts.stage not in (*INPUT_STAGES, "logits"):
        raise RecordingError(
            f"{holds}; another router needs the scores of all experts, or router inputs.",
            "moegeom capture CKPT --text FILE --keep hidden (or logits) --out REC records them.",
        )
    if request.arithmetics and facts.stage not in INPUT_STAGES:
        raise RecordingError(
            f"{holds}; what rounding moves follows from router inputs.",
            "Leave --arith out, or record inputs: moegeom capture CKPT --text FILE --out REC.",
        )
    return scan(dataclasses.replace(request, what_ifs=what_ifs, grid=None), watch, opened)


def read_grid(path: Path) -> tuple[str, ...]:
    """The what-ifs of a TOML file: a table for each kind, with lists of values.

    ``[smooth]`` with ``eps = [0.02, 0.05]`` and ``b = [9, 50]`` are four what-ifs. A kind may have
    several tables, ``[[smooth]]``.

    Raises
    ------
    UsageError
        When the file cannot be read, is no such table, or asks for too many.
    """
    with refused_as(UsageError, f"--grid {path}", _GRID):
        try:
            text = read_regular(path, 4 * MOST_TOML, follows=True).decode("utf-8")
        except OSError as error:
            raise DocumentError(f"cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise DocumentError(f"is not UTF-8 at byte {error.start}") from None
        specs = tuple(itertools.islice(_specs(parse_toml(text)), MOST + 1))
        if not specs:
            raise DocumentError("names no what-if")
        if len(specs) > MOST:
            raise DocumentError(f"more than {MOST} what-ifs", _FEWER)
    parse_what_ifs(specs)
    return specs


_GRID = (
    "A grid has a table for each what-if, with a value or a list of values for each parameter: "
    "smooth = { eps = [0.02, 0.05] }."
)


def _specs(tables: Mapping[str, Any]) -> Iterator[str]:
    entries = ((kind, e if isinstance(e, list) else [e]) for kind, e in tables.items())
    for kind, table in ((kind, table) for kind, several in entries for table in several):
        if not isinstance(table, dict):
            raise DocumentError(f"'{kind[:40]}' is no table")
        listed = {name: v if isinstance(v, list) else [v] for name, v in table.items()}
        for name, values in listed.items():
            if not values or any(not isinstance(v, int | float | str) for v in values):
                place = f"{kind[:40]}.{name[:40]}"
                raise DocumentError(f"{place} is neither a value nor a list of values")
        for values in itertools.product(*listed.values()):
            pairs = zip(listed, values, strict=True)
            words = [f"{name}={v}" for name, v in pairs]
            yield f"{kind}:{','.join(words)}" if words else kind
