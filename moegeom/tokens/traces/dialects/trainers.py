"""What trainers store of a step: verl and AReaL, slime and miles.

verl and AReaL store the arrays of a padded batch by name, in npz, safetensors, or a
dictionary that ``torch.save`` wrote; of them ``routed_experts``, (sequences, padded length, layers,
k), and what says which rows are tokens. They are read by ranges of sequences, so that a file may be
of any size.

verl and AReaL (the batch of a ``DataProto``, or a trajectory) hold ``attention_mask`` and
``input_ids``. verl pads prompts on the left, and rows of padding, of the last token and of tool
outputs are zeros. AReaL repeats the row before a row that is missing, and says in
``r3_routing_valid`` which sequences it had to fill so.

slime and miles store with ``--save-debug-rollout-data`` or ``--dump-details``
``{"rollout_id", "samples": [...]}`` in a file of ``torch.save``; a sample holds its ``tokens``
(prompt and response) and ``rollout_routed_experts``, (tokens - 1, layers, k): a tensor in slime, a
NumPy array in miles. Layers without a router are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from moegeom.checkpoint.dtypes import DTYPES
from moegeom.core.errors import RecordingError
from moegeom.core.limits import TRACE_BYTES
from moegeom.tokens.foreign.arrays import open_tensor_file
from moegeom.tokens.foreign.npy import npz_rows, npz_shapes
from moegeom.tokens.rows import FileRows, Rows, read_rows
from moegeom.tokens.traces.dialects._torch_file import TorchFile, has_keys, open_torch_file
from moegeom.tokens.traces.trace import (
    WITHOUT_IDS,
    Dialect,
    Entry,
    Pieces,
    Place,
    RequestTrace,
    Trace,
    counted_notes,
    in_pieces,
    rows_of_piece,
)

# --------------------------------------------------------------------------------- padded batches

#: What trainers call the ids of a batch.
_IDS = "routed_experts"

_MASK, _TOKENS, _VALID = "attention_mask", "input_ids", "r3_routing_valid"


def read_verl(path: Path, place: Place) -> Pieces:
    """Sequences by pieces, with their masks if there are any; invalid ones are counted."""
    arrays = _batch_rows(path, (_TOKENS,), (_MASK, _VALID))
    ids = arrays[_IDS]
    size = _shape_of(ids)[:2]
    _refuse_other_shapes(path, arrays, {_MASK: size, _TOKENS: size, _VALID: size[:1]})
    for start, stop in _ranges_of(path, ids, place[0]):
        part = {name: read_rows(rows, start, stop) for name, rows in arrays.items()}
        mask = part[_MASK] != 0 if _MASK in part else None
        # padded token ids without a mask say nothing about which are tokens
        token_ids = None if mask is None else part.get(_TOKENS)
        requests = [
            RequestTrace(
                str(start + number),
                of_sequence,
                token_ids=None if token_ids is None else token_ids[number],
                mask=None if mask is None else mask[number],
                is_place=True,
            )
            for number, of_sequence in enumerate(part[_IDS])
            if _VALID not in part or part[_VALID][number]
        ]
        num_filled = len(part[_IDS]) - len(requests)
        notes = counted_notes({"sequences whose rows the trainer filled up, left out": num_filled})
        yield (
            Trace(path.name, "verl or AReaL", tuple(requests), notes=notes),
            (stop, 0) if stop < ids.num_rows else None,
        )


def _holds_batch(path: Path) -> bool:
    """Whether a file holds such ids, and a mask beside them."""
    if path.suffix == ".npz" and path.is_file():
        shapes = npz_shapes(path)
        return len(shapes.get(_IDS) or ()) == 4 and _MASK in shapes
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return {_IDS, _MASK} <= set(open_tensor_file(path).names)
        except RecordingError:
            return False
    return has_keys(path, _IDS, _MASK)


def _batch_rows(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    """Those of the arrays ``names`` and ``masks`` that the file holds, and the ids, a sequence to a
    row; ids must be there.

    Raises
    ------
    RecordingError
        When it is none of the three kinds of file, is damaged, or its ids have other than four
        dimensions.
    """
    if path.suffix not in _READERS:
        raise RecordingError(
            f"{path.name}: expected one of {', '.join(_READERS)}.",
            "Save the tensors of the batch: np.savez, safetensors, or torch.save of a dictionary.",
        )
    arrays = _READERS[path.suffix](path, (_IDS, *names), masks)
    ids = arrays.get(_IDS)
    if ids is None or len(ids.row_shape) != 3:
        shape = "none" if ids is None else str(_shape_of(ids))
        raise RecordingError(
            f"{path.name}: {_IDS} has shape {shape}; expected (sequences, tokens, layers, k)."
        )
    return arrays


def _shape_of(rows: Rows) -> tuple[int, ...]:
    """The shape of the whole array."""
    return (rows.num_rows, *rows.row_shape)


def _refuse_other_shapes(
    path: Path, arrays: Mapping[str, Rows], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises RecordingError where an array that is there has another shape than the ids ask for."""
    for name, shape in expected.items():
        if name in arrays and _shape_of(arrays[name]) != shape:
            raise RecordingError(
                f"{path.name}: {name} has shape {_shape_of(arrays[name])}; {_IDS} has {shape}."
            )


def _ranges_of(path: Path, ids: Rows, first: int) -> Iterator[tuple[int, int]]:
    """Ranges of sequences from ``first`` on with some ``PIECE_BYTES`` of ids; one is empty where
    there is none.

    Raises
    ------
    RecordingError
        When one sequence is too large to be held.
    """
    each = ids.width * ids.dtype.itemsize
    if each > TRACE_BYTES:
        raise RecordingError(
            f"{path.name}: {each:,} bytes of ids of one sequence, more than the {TRACE_BYTES:,} "
            "allowed.",
            "Cut the padding behind the longest sequence.",
        )
    step = rows_of_piece(each)
    for start in range(first, ids.num_rows, step) or (first,):
        yield start, min(start + step, ids.num_rows)


def _safetensors(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    opened = open_tensor_file(path)
    arrays: dict[str, Rows] = {}
    for name in (one for one in (*names, *masks) if one in opened.names):
        info = opened.file.info(name)
        dtype = DTYPES.get(info.dtype)
        if dtype is None or dtype.numpy is None or dtype.numpy.kind not in "iub":
            raise RecordingError(f"{path.name}: {name} is {info.dtype}; expected integers.")
        num_rows, *row = info.shape or (0,)
        arrays[name] = FileRows(path, info.offset, dtype.numpy, num_rows, tuple(row))
    return arrays


def _torch(path: Path, names: Collection[str], masks: Collection[str]) -> dict[str, Rows]:
    file = open_torch_file(path)
    root: Any = file.root
    if not isinstance(root, dict):
        raise RecordingError(f"{path.name}: holds {type(root).__name__}; expected a dictionary.")
    present = [name for name in (*names, *masks) if name in root]
    return {name: file.rows(root[name], f"{path.name}: {name}") for name in present}


_READERS: Mapping[str, Callable[[Path, Collection[str], Collection[str]], dict[str, Rows]]] = {
    ".npz": npz_rows,
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
}


VERL = Dialect(
    name="verl",
    versions="verl 0.9.1; AReaL PR 1496 as of 2026-07",
    source="verl/experimental/agent_loop/agent_loop.py (routed_experts); areal/engine/r3 "
    "preprocess.py (preprocess_routed_experts_batch)",
    recognises=_holds_batch,
    pieces=read_verl,
)


# --------------------------------------------------------------------------------- slime and miles

_ROLLOUT_IDS = "rollout_routed_experts"


def read_rollouts(path: Path, place: Place) -> Pieces:
    """Samples by pieces; those without ids are counted."""
    file = open_torch_file(path)
    samples = file.root.get("samples") if isinstance(file.root, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RecordingError(f"{path.name}: holds no list of samples.")

    def entries() -> Iterator[Entry]:
        for number in range(place[0], len(samples)):
            is_missing = samples[number].get(_ROLLOUT_IDS) is None
            requests = [] if is_missing else [_sample(file, number, samples[number])]
            yield (number, 0), requests, {f"samples {WITHOUT_IDS}": is_missing}

    return in_pieces(path.name, "slime or miles", entries())


def _sample(file: TorchFile, number: int, sample: dict[Any, Any]) -> RequestTrace:
    where = f"{file.label}: sample {number}"
    ids = file.array(sample[_ROLLOUT_IDS], f"{where}: {_ROLLOUT_IDS}")
    tokens = sample.get("tokens")
    token_ids = None if tokens is None else file.array(tokens, f"{where}: tokens")
    if ids.ndim != 3 or (token_ids is not None and token_ids.ndim != 1):
        raise RecordingError(
            f"{where}: {_ROLLOUT_IDS} has shape {ids.shape}; expected (tokens - 1, layers, k)."
        )
    num_prompt, num_response = None, sample.get("response_length")
    if token_ids is not None and type(num_response) is int:
        num_prompt = len(token_ids) - num_response if 0 <= num_response <= len(token_ids) else None
    return RequestTrace(str(number), ids, token_ids=token_ids, num_prompt=num_prompt, is_place=True)


SLIME = Dialect(
    name="slime",
    versions="slime 624b824a89 and miles 31f1ca961a (2026-08-21)",
    source="slime/utils/types.py (Sample), slime/ray/rollout.py; PRs slime 715, 810, 1045",
    recognises=lambda path: has_keys(path, "samples", _ROLLOUT_IDS),
    pieces=read_rollouts,
)
