"""llama.cpp: logs of ``llama-eval-callback``.

``llama-eval-callback`` prints every tensor that was computed. The chosen experts of layer N are
``ffn_moe_topk-N``, k numbers for each token of a batch, in descending order of their selection
scores. An axis longer than 6 is printed with a gap, so that ids are whole only for k <= 6, and only
in batches of at most 6 tokens (each generated token is one).

The last layer is computed for those tokens alone whose logits are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.core.errors import RecordingError
from moegeom.core.files import open_regular
from moegeom.core.limits import TRACE_BYTES
from moegeom.core.shapes import Int32
from moegeom.core.text import number_of
from moegeom.tokens.traces.trace import Dialect, RequestTrace, Trace, counted_notes


def _log(
    path: Path,
    writer: str,
    ids: Int32[np.ndarray, "tokens layers slots"],
    layers: tuple[int, ...],
    left_out: dict[str, int],
) -> Trace:
    """All tokens in the order of a log, as one request."""
    return Trace(
        path.name,
        writer,
        (RequestTrace("log", ids, is_place=True),),
        layers=layers,
        ids_are="logical",
        has_documents=False,
        notes=counted_notes(left_out),
    )


_UNCOMPUTED = "tokens left out because the last layer was not computed for them"


def _stacked(
    of_layers: Sequence[np.ndarray], where: str, hint: str = ""
) -> tuple[Int32[np.ndarray, "tokens layers slots"], int]:
    """The tokens of a batch that all layers have, and how many the last one left out."""
    lengths = [len(rows) for rows in of_layers]
    most, num_rows = lengths[0], lengths[-1]
    if len(set(lengths[:-1])) > 1 or num_rows > most or num_rows not in (1, most):
        raise RecordingError(
            f"{where}: layers of one batch have {sorted(set(lengths))} tokens of "
            f"{of_layers[-1].shape[1]} experts; expected as many, or 1 at the last.",
            hint,
        )
    rows = [of_layer[-num_rows:] for of_layer in of_layers]
    return np.stack(rows, axis=1).astype(np.int32, copy=False), most - num_rows


# ------------------------------------------------------------------------- llama-eval-callback

#: Numbers of an axis beyond which a gap is printed.
_PRINTED = 6

_LINE_BYTES = 4096

#: Text of a log that is searched to recognise it.
_SEARCHED = 4_000_000

_PRINTERS = (b"common_debug_cb_eval:", b"ggml_debug:")

_HEADER = re.compile(
    rb"ffn_moe_topk-(\d{1,4}) .{0,400}= \{(\d{1,9}), (\d{1,9}), (\d{1,9}), (\d{1,9})\}"
)
_NUMBER = re.compile(rb"-?\d{1,9}\.\d+")


@dataclass(frozen=True, eq=False)
class _Printed:
    """One printed tensor; ``ids`` is None where it has a gap."""

    where: str
    layer: int
    num_tokens: int
    top_k: int
    ids: Int32[np.ndarray, "tokens slots"] | None


def is_log(path: Path) -> bool:
    """True for a text in which a tensor of chosen experts is printed."""
    if path.suffix not in (".log", ".txt", "") or not path.is_file():
        return False
    with open_regular(path, follows=True) as stream:
        text = stream.read(_SEARCHED)
    return any(printer in text for printer in _PRINTERS) and b"ffn_moe_topk-" in text


def read_log(path: Path) -> Trace:
    """All tokens in the order of the log, as one request."""
    parts: list[Int32[np.ndarray, "tokens layers slots"]] = []
    gaps, uncomputed, size, layers = 0, 0, 0, ()
    for batch in _printed_batches(path):
        of_batch = tuple(printed.layer for printed in batch)
        layers = layers or of_batch
        if of_batch != layers:
            raise RecordingError(
                f"{batch[0].where}: a batch has {number_of(len(of_batch), 'layer')} with choices, "
                f"the one before it {len(layers)}.",
                "The log was cut off, or lines are missing.",
            )
        wide = next((printed for printed in batch if printed.top_k > _PRINTED), None)
        if wide is not None:
            raise RecordingError(
                f"{wide.where}: elided: {wide.top_k} experts a token, of which the log shows the "
                f'first 3 and the last 3 ("...").',
                "Record with moegeom capture, or count with llama-imatrix.",
            )
        if any(printed.ids is None for printed in batch):
            gaps += 1
            continue
        printed_ids = [printed.ids for printed in batch if printed.ids is not None]
        stacked, num_left_out = _stacked(printed_ids, batch[0].where)
        uncomputed += num_left_out
        parts.append(stacked)
        size += parts[-1].nbytes
        if size > TRACE_BYTES:
            raise RecordingError(f"{path.name}: more than {TRACE_BYTES:,} bytes of ids.")
    if not parts:
        raise RecordingError(
            f"{path.name}: elided: {number_of(gaps, 'batch', 'batches')}, each of more than "
            f"{_PRINTED} tokens, of which the "
            f'log shows the first 3 and the last 3 ("...").',
            "Generate token by token, record with moegeom capture, or count with llama-imatrix.",
        )
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise RecordingError(
            f"{path.name}: batches have {sorted(shapes)} (layers, experts); expected one shape.",
            "The log is of two models.",
        )
    gap = f"batches of more than {_PRINTED} tokens, which the log shows with gaps, left out"
    left_out = {gap: gaps, _UNCOMPUTED: uncomputed}
    return _log(path, "llama.cpp eval-callback", np.concatenate(parts), layers, left_out)


def _printed_batches(path: Path) -> Iterator[list[_Printed]]:
    """Tensors by batch: a batch ends where layers begin again."""
    batch: list[_Printed] = []
    for printed in _tensors(path):
        if batch and printed.layer <= batch[-1].layer:
            yield batch
            batch = []
        batch.append(printed)
    if batch:
        yield batch


def _tensors(path: Path) -> Iterator[_Printed]:
    with open_regular(path, follows=True) as stream:
        number = 0
        while line := stream.readline(_LINE_BYTES):
            number += 1
            if b"\0" in line:
                raise RecordingError(f"{path.name}: line {number} is no text.", "Copy it again.")
            if b"ffn_moe_topk-" not in line:
                continue
            header = _HEADER.search(line)
            # a view of it is an argument of the next tensors too
            if header is None or line.index(b"ffn_moe_topk-") > line.index(b"="):
                continue
            where = f"{path.name}: line {number}"
            layer, top_k, num_tokens, *others = map(int, header.groups())
            if others != [1, 1] or not 0 < top_k <= 4096:
                raise RecordingError(
                    f"{where}: {top_k} x {num_tokens} x {others}; expected experts x tokens."
                )
            body: list[bytes] = []
            while len(body) < 64 and (line := stream.readline(_LINE_BYTES)):
                number += 1
                if b"sum = " in line:
                    break
                body.append(line)
            ids = _parse(body, line, num_tokens, top_k, where)
            yield _Printed(where, layer, num_tokens, top_k, ids)


def _parse(
    body: list[bytes], last: bytes, num_tokens: int, top_k: int, where: str
) -> Int32[np.ndarray, "tokens slots"] | None:
    """The ids, held against the printed sum; None where there is a gap."""
    if num_tokens > _PRINTED or top_k > _PRINTED:
        return None
    rows = [numbers for line in body if (numbers := _NUMBER.findall(line))]
    total = _NUMBER.search(last.partition(b"sum = ")[2])
    if len(rows) != num_tokens or any(len(row) != top_k for row in rows) or total is None:
        raise RecordingError(
            f"{where}: {number_of(len(rows), 'row')} of {sorted({len(row) for row in rows})} "
            f"numbers and {'a' if total else 'no'} sum; expected {num_tokens} of {top_k}.",
            "The log was cut off.",
        )
    ids = np.array([[float(value) for value in row] for row in rows])
    if (ids != np.rint(ids)).any() or ids.sum() != float(total[0]):
        raise RecordingError(
            f"{where}: ids {ids.tolist()} with sum {ids.sum():g}; the log says {float(total[0]):g}."
        )
    return ids.astype(np.int32)


DIALECT = Dialect(
    name="llama_cpp",
    versions="common/debug.cpp 27c299a6ec and examples/eval-callback fe0686164d (2025, 2026)",
    source="llama.cpp common/debug.cpp (common_debug_print_tensor), build_moe_ffn",
    recognises=is_log,
    read=read_log,
)
