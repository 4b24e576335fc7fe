"""prime-rl and SkyRL: replies with packed ids, and prime-rl's micro batches for a trainer.

An object with base64 ``data``, its ``shape`` and its ``dtype`` stands where vLLM puts its own form,
in each choice of a reply, or on its own in a record. ``dtype`` is the narrowest that holds the
largest id of this one response (absent in old files: uint8), ``start`` the position of the first
row. Missing rows at the end are written as zeros.

``rank_<n>.bin`` of the rollouts folder, in msgpack, is a list of micro batches, each an array of
fields in a fixed order; of them ``input_ids``, ``position_ids``, ``sequence_lengths`` and
``routed_experts`` (bytes, shape, dtype) are read. A micro batch packs several sequences, whose
positions begin at 0 again; so do those of the padding behind them. There is a row for each token;
rows that were not captured, such as that of the last token, are zeros. A sequence that was cut to
the trainer's length ends with a row of choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError, first_line
from moegeom.core.files import open_regular, read_regular, reading
from moegeom.core.limits import LIST_BYTES, TRACE_BYTES
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of, quoted
from moegeom.tokens.stages import EXPERT_DTYPES
from moegeom.tokens.traces.dialects._json import (
    Ids,
    ReplyFields,
    decoded,
    from_base64,
    replies,
    shaped,
    shows,
)
from moegeom.tokens.traces.trace import Dialect, RequestTrace, Trace, counted_notes


def _packed_ids(value: Any, where: str) -> Ids:
    """An object with base64 ``data``, ``shape`` and ``dtype`` (absent: uint8)."""
    if not isinstance(value, dict):
        raise RecordingError(f"{where}: holds {type(value).__name__}; expected an object.")
    shape, name = value.get("shape"), value.get("dtype", "uint8")
    if not isinstance(name, str) or name not in EXPERT_DTYPES:
        raise RecordingError(
            f"{where}: dtype {name!r:.40}; expected one of {', '.join(EXPERT_DTYPES)}."
        )
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise RecordingError(f"{where}: shape {shape!r:.60}; expected a list of sizes.")
    ids = shaped(from_base64(value.get("data"), where), EXPERT_DTYPES[name], shape, where)
    if ids.ndim != 3:
        raise RecordingError(f"{where}: shape {ids.shape}; expected (tokens, layers, k).")
    return ids


def _decoded(value: Any, where: str) -> Ids:
    return decoded({"an object with data, shape and dtype": _packed_ids}, value, where)


_FIELDS = ReplyFields(items="choices[]", decode=_decoded, start=("routed_experts.start",))

DIALECT = Dialect(
    name="prime_rl",
    versions="prime-rl 559b44772e, SkyRL a9564572eb (both 2026-08-21)",
    source="prime_rl inference routes and transport types; skyrl generate_wire.py; PR 3051",
    recognises=lambda path: shows(path, rb'"routed_experts"\s{0,9}:\s{0,9}\{', rb'"shape"\s{0,9}:'),
    pieces=replies("prime-rl or SkyRL", [_FIELDS, replace(_FIELDS, items="")]),
)

#: Places of the fields that are read among those of a micro batch.
_TOKENS, _POSITIONS, _LENGTHS, _ROUTED = 0, 4, 5, 10

#: The token that a micro batch is filled up with.
_PAD = 1

#: First bytes of arrays in msgpack: short ones, and those with a length of 2 or 4 bytes.
_ARRAYS = dict.fromkeys(range(0x90, 0xA0), 1) | {0xDC: 3, 0xDD: 5}


def holds_batches(path: Path) -> bool:
    """True for ``rank_<n>.bin`` that begins with an array of arrays of arrays of integers."""
    if not path.match("rank_*.bin") or not path.is_file():
        return False
    with open_regular(path, follows=True) as stream:
        start = stream.read(16)
    for _ in range(3):
        skipped = _ARRAYS.get(start[0]) if start else None
        if skipped is None:
            return False
        start = start[skipped:]
    return bool(start) and (start[0] < 0x80 or 0xCC <= start[0] <= 0xCF)


def read_batches(path: Path) -> Trace:
    """Every sequence of every micro batch; micro batches without routed experts are counted."""
    with reading(path, RecordingError, "Give the files of ranks one by one."):
        raw = read_regular(path, TRACE_BYTES, follows=True)
    batches = _unpacked(raw, "list[list[Raw]]", path.name)
    requests: list[RequestTrace] = []
    without = padding = 0
    for number, batch in enumerate(batches):
        where = f"{path.name}: micro batch {number}"
        if len(batch) <= _LENGTHS:
            raise RecordingError(
                f"{where}: {number_of(len(batch), 'field')}; expected at least {_LENGTHS + 1}.",
                "Another version of prime-rl wrote it.",
            )
        routed = batch[_ROUTED] if len(batch) > _ROUTED else None
        if routed is None or bytes(routed) == b"\xc0":
            without += 1
        else:
            sequences = list(_sequences(batch, routed, number, where))
            if _is_padding(sequences[-1:]):
                padding += len(sequences.pop().ids)
            requests += sequences
    counts = {
        "micro batches without routed experts": without,
        "tokens of padding behind packed sequences, left out": padding,
    }
    return Trace(
        path.name,
        "prime-rl",
        tuple(requests),
        last_is_routed=_only_the_longest_are_cut(requests),
        notes=counted_notes(counts),
    )


def _is_padding(last: Sequence[RequestTrace]) -> bool:
    """Whether the last sequence of a micro batch is what the trainer fills it up with."""
    return any(
        one.token_ids is not None and not one.ids.any() and bool((one.token_ids == _PAD).all())
        for one in last
    )


def _only_the_longest_are_cut(requests: Sequence[RequestTrace]) -> bool:
    """Whether sequences whose last row holds choices have the length of the longest."""
    cut = [len(one.ids) for one in requests if len(one.ids) and one.ids[-1].any()]
    return bool(cut) and min(cut) == max(len(one.ids) for one in requests)


def _unpacked(raw: Any, kind: str, where: str) -> Any:
    """What msgpack holds, if it is of this kind: nothing is converted, nothing of it is code."""
    from msgspec import MsgspecError, Raw, msgpack

    kinds = {
        "list[list[Raw]]": list[list[Raw]],
        "integers": list[int],
        "(bytes, shape, dtype)": tuple[bytes, list[int], str],
    }
    try:
        return msgpack.decode(raw, type=kinds[kind])
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RecordingError(
            f"{where}: {first_line(error)[:120]}.",
            "Is it whole, and of a version of prime-rl with the same order of fields?",
        ) from None


def _sequences(
    batch: Sequence[Any], routed: Any, number: int, where: str
) -> Iterator[RequestTrace]:
    tokens, positions, lengths = (
        _integers(batch[place], f"{where}: field {place}")
        for place in (_TOKENS, _POSITIONS, _LENGTHS)
    )
    data, shape, dtype = _unpacked(routed, "(bytes, shape, dtype)", f"{where}: routed_experts")
    if dtype not in EXPERT_DTYPES or len(shape) != 3 or not all(0 <= n < 2**40 for n in shape):
        raise RecordingError(
            f"{where}: routed_experts is {quoted(dtype)} of shape {quoted(shape)}; expected "
            f"(tokens, layers, k) of {', '.join(EXPERT_DTYPES)}."
        )
    ids = shaped(data, EXPERT_DTYPES[dtype], shape, where)
    ends = np.cumsum(lengths)
    if not len(tokens) == len(positions) == len(ids) == int(lengths.sum()):
        raise RecordingError(
            f"{where}: {number_of(len(tokens), 'token')}, {len(positions)} positions, "
            f"{number_of(len(ids), 'row')} and sequences of {int(lengths.sum())} tokens; expected "
            "as many of each."
        )
    starts = np.flatnonzero(positions == 0)
    begun = {0, *ends[:-1][lengths[1:] > 0].tolist()} if len(tokens) else set()
    if not begun <= set(starts.tolist()):
        raise RecordingError(
            f"{where}: positions do not begin at 0 where its sequences do.",
            "Positions of several axes (images) do not say where a sequence begins.",
        )
    stops = [*starts[1:].tolist(), len(ids)]
    for part, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=False)):
        yield RequestTrace(
            f"{number}/{part}", ids[start:stop], token_ids=tokens[start:stop], is_place=True
        )


def _integers(raw: Any, where: str) -> Int64[np.ndarray, "numbers"]:
    if memoryview(raw).nbytes > LIST_BYTES:
        raise RecordingError(f"{where}: has more than the {LIST_BYTES:,} bytes allowed.")
    numbers = _unpacked(raw, "integers", where)
    if numbers and not 0 <= min(numbers) <= max(numbers) < 2**31:
        raise RecordingError(f"{where}: numbers from {min(numbers)} to {max(numbers)}.")
    return np.array(numbers, np.int64)


BATCHES = Dialect(
    name="prime_rl_batches",
    versions="prime-rl 69308b88c0 to 559b44772e (2026-08-19 to 21)",
    source="prime_rl/transports/rollouts types.py (MicroBatch), filesystem.py; trainer/batch.py",
    recognises=holds_batches,
    read=read_batches,
)
