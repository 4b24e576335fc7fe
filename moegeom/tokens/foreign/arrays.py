"""Foreign arrays as a token source: which array is which router, and the columns beside them.

A kind of file says how one array of it is read; ``open_arrays`` does the rest for all kinds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from moegeom.checkpoint.dtypes import DTYPES as STORED_DTYPES
from moegeom.checkpoint.formats.safetensors import SafetensorsFile
from moegeom.checkpoint.reading import CountingFile, ReadLog
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.limits import UNSORTED_DOCUMENTS
from moegeom.core.row_keys import slug
from moegeom.core.shapes import Bool, Int64, Shaped
from moegeom.core.text import natural, number_of
from moegeom.core.tokens import SourceFacts, Stage, TokenColumns
from moegeom.tokens.recording.columns import DTYPES, UnknownColumns, unknown_columns
from moegeom.tokens.rows import (
    ArrayRows,
    ColumnSource,
    FileRows,
    Rows,
    StoredSource,
    as_recording_error,
    read_rows,
)
from moegeom.tokens.source import Request
from moegeom.tokens.stages import EXPERT_DTYPES, INPUT_STAGES, STAGE_TENSORS, StoredTensor

#: Keys with these names are facts about tokens, one integer each, and no routers.
COLUMN_KEYS = ("document", "position", "token_id")

#: What transformers calls the logits of a batch, and the tensors that they were computed from.
BATCH, MASK, TOKENS = "router_logits", "attention_mask", "input_ids"

#: Said of a batch without its mask.
PADDING_COUNTED = f"padding of the batch, if it has any, is counted: no {MASK} beside {BATCH}"

#: Tokens whose documents are read at once when they are counted; whole blocks.
_PIECE = 2**16

#: Tokens of a block: a number is kept for each, and to its first token a read goes back.
_BLOCK = 2**12

COLUMN_DTYPES = tuple(EXPERT_DTYPES.values())


#: What an array is: a column, the rows of one router, or these or the layers of all routers.
Form = Literal["column", "rows", "layers"]

#: The numbers of axes that a form may have, and the words for them.
_AXES: dict[Form, tuple[tuple[int, ...], str]] = {
    "column": ((1,), "(tokens,)"),
    "rows": ((2,), "(tokens, width)"),
    "layers": ((2, 3), "(tokens, width) or (layers, tokens, width)"),
}


class ReadArray(Protocol):
    """Reads the array of a key, of one of some dtypes, as its layers: one but in a stack."""

    def __call__(self, key: str, dtypes: Collection[np.dtype], form: Form, /) -> Sequence[Rows]: ...


def columns_of_batch(
    beside: Mapping[str, np.ndarray], num_rows: int, subject: str | Path, verb: str
) -> tuple[Bool[np.ndarray, "rows"] | slice, dict[str, Int64[np.ndarray, "tokens"]]]:
    """Which rows of a batch, (sequences, length), are no padding, and the columns of those.

    ``beside`` are its mask and its token ids, as far as there are any; its sequences are documents.

    Raises
    ------
    RecordingError
        When one of them is of another batch; ``verb`` says how ``subject`` comes to the right one.
    """
    for name, array in beside.items():
        if array.ndim != 2 or array.size != num_rows:
            raise RecordingError(
                f"{subject}: {name} has shape {array.shape}; {BATCH} has "
                f"{number_of(num_rows, 'row')}: expected (sequences, length), as many.",
                f"{verb} those of the same batch.",
            )
    used = beside[MASK].reshape(-1) != 0 if MASK in beside else slice(None)
    columns = {}
    if beside:
        num_documents, length = next(iter(beside.values())).shape
        columns["document"] = np.repeat(np.arange(num_documents), length)[used]
    if TOKENS in beside:
        columns["token_id"] = beside[TOKENS].reshape(-1)[used].astype(np.int64)
    return used, columns


def refuse_other_form(
    shape: tuple[int, ...], form: Form, subject: str, noun: str = "array"
) -> None:
    """Raises RecordingError where a shape is not of the form, or holds nothing; the hint is how an
    array of batches, a variable called ``noun``, gets one row per token.
    """
    axes, expected = _AXES[form]
    if len(shape) not in axes or not all(size > 0 for size in shape):
        none = "" if all(shape) else ", none of them 0"
        raise RecordingError(
            f"{subject} has shape {shape}; expected {expected}{none}.",
            flattening(noun, len(shape), form),
        )


def flattening(noun: str, num_axes: int, form: Form = "rows") -> str:
    """How an array of so many axes gets one row per token."""
    if num_axes < 2 or (num_axes == 2 and form != "column"):
        return ""
    if form == "column":
        return f"Bring it to one number per token: {noun}.reshape(-1)."
    flat = f"{noun}.reshape(-1, {noun}.shape[-1])"
    if form == "rows":
        return f"Bring it to one row per token: {flat}."
    stacked = f"{noun}.reshape({noun}.shape[0], -1, {noun}.shape[-1])"
    return (
        f"Bring it to one row per token: {stacked} where layers come first, the same of "
        f"{noun}.swapaxes(0, 1) where batches come first and layers second, else {flat}."
    )


#: Where an array of other numbers is meant, by the kind of its dtype and of those expected.
_CASTS = {
    ("u", "f"): "Bits of bfloat16 are array.view(ml_dtypes.bfloat16).astype(numpy.float32).",
    ("V", "f"): "np.save forgets the name of bfloat16: save float32, or use safetensors.",
    ("i", "f"): "Whole numbers are expert ids: stage ids.",
    ("f", "i"): "Ids as floats are array.astype(numpy.int32); logits are stage logits.",
    ("f", "u"): "Ids as floats are array.astype(numpy.int32); logits are stage logits.",
}


def refuse_other_dtype(dtype: np.dtype | str, dtypes: Collection[np.dtype], subject: str) -> None:
    """Raises RecordingError for numbers that are none of these; the hint says what may be meant."""
    if dtype in dtypes:
        return
    expected = " or ".join(map(str, dtypes))
    own = np.dtype(dtype).kind if isinstance(dtype, np.dtype) else ""
    hint = _CASTS.get((own, next(iter(dtypes)).kind.replace("V", "f")), "")
    raise RecordingError(f"{subject} is {dtype}; expected {expected}.", hint)


#: What more items than routers by one are, and what to take instead.
_HIDDEN_STATES = (
    "One item more than layers is what output_hidden_states gives: states between blocks, which no "
    "router reads. Record what routers read: moegeom capture, or mg.Recorder in a loop of yours."
)


def refuse_hidden_states(shape: tuple[int, ...], subject: str, request: Request) -> None:
    """Raises RecordingError for batches of inputs of one item more than there are routers."""
    if len(shape) == 4 and _are_hidden_states(shape[0], request):
        own = len(request.checkpoint_routers)
        message = f"{subject} has shape {shape}; the checkpoint has {own} routers."
        raise RecordingError(message, _HIDDEN_STATES)


def _are_hidden_states(num_layers: int, request: Request) -> bool:
    return request.stage in INPUT_STAGES and num_layers == len(request.checkpoint_routers) + 1 > 2


def _other_layers(key: str, layers: Sequence[Rows], request: Request) -> str:
    """What to do with an array of another number of layers."""
    if _are_hidden_states(len(layers), request):
        return _HIDDEN_STATES
    if layers[0].num_rows in (len(request.checkpoint_routers), len(request.routers)):
        return f"Its layers come second: save {key}.swapaxes(0, 1)."
    return (
        "Choose the routers that it holds with --layers, or save one array for each "
        "router: np.savez(file, **{'text.3': array, ...})."
    )


def layers_in_file(
    path: Path, start: int, dtype: np.dtype, shape: tuple[int, ...]
) -> list[FileRows]:
    """The layers of an array of any form that lies in one piece of a file."""
    num_layers, num_rows, width = _layered(shape)
    starts = (start + n * num_rows * width * dtype.itemsize for n in range(num_layers))
    return [FileRows(path, at, dtype, num_rows, (width,)) for at in starts]


def layers_in_memory(array: Shaped[np.ndarray, "..."], where: str) -> list[ArrayRows]:
    """The layers of an array of any form that is in memory."""
    return [ArrayRows(layer, where) for layer in array.reshape(_layered(array.shape))]


def _layered(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (layers, tokens, width)."""
    num_layers = shape[0] if len(shape) == 3 else 1
    return num_layers, shape[len(shape) == 3], shape[-1] if len(shape) > 1 else 1


def foreign_tensor(path: Path, request: Request) -> tuple[Stage, StoredTensor]:
    """The stage that the caller named, which must have one array per router, and its tensor."""
    if request.stage is None or len(STAGE_TENSORS[request.stage]) != 1:
        raise UsageError(
            f"{path.name}: stage {request.stage} is read from recordings only.",
            "Write one with moegeom.tokens.recording.writer.RecordingWriter.",
        )
    return request.stage, STAGE_TENSORS[request.stage][0]


def open_arrays(
    path: Path,
    request: Request,
    keys: Collection[str],
    layers_of: ReadArray,
    *,
    may_stack: bool = True,
    columns: Collection[str] = COLUMN_KEYS,
    size_bytes: int | None = None,
) -> StoredSource:
    """The token source made of the arrays ``keys`` of a file.

    Those whose keys are ``columns`` are facts about tokens. With ``may_stack`` the only other array
    may hold the layers of all routers. ``size_bytes`` None is the size of the file at ``path``.

    Raises
    ------
    UsageError
        When the stage is not read from such files.
    RecordingError
        When arrays cannot be assigned to routers, or are no numbers of that kind.
    """
    dtypes = tuple(foreign_tensor(path, request)[1].dtypes.values())
    of_routers = [key for key in keys if key not in columns]
    if may_stack and len(of_routers) == 1 and not request.router_map and request.routers:
        (key,) = of_routers
        rows = assign_layers(path, key, layers_of(key, dtypes, "layers"), request)
    else:
        assigned = assign_routers(path, of_routers, request)
        rows = {router: layers_of(key, dtypes, "rows")[0] for router, key in assigned.items()}
    beside = {key: layers_of(key, COLUMN_DTYPES, "column")[0] for key in columns if key in keys}
    return foreign_source(path, request, rows, beside, size_bytes)


def assign_routers(path: Path, keys: Collection[str], request: Request) -> dict[str, str]:
    """The key of each router, in the checkpoint's order.

    Without a router map every key must be understood; with one, keys that nothing names are left
    alone, so that a file may hold more than is asked for. Arrays of routers that the checkpoint has
    and that are not asked for are left alone always.
    """
    everybody = (*(one.name for one in request.checkpoint_routers), *request.routers)
    names = {alias: router for router in everybody for alias in (router, slug(router))}
    router_map = expanded(request.router_map, keys)
    names |= router_map
    if len(keys) == len(request.routers) == 1 and not request.router_map:
        names = dict(zip(keys, request.routers, strict=True))
    keys_of: dict[str, list[str]] = {}
    for key in keys:
        keys_of.setdefault(names.get(key, ""), []).append(key)
    unknown = keys_of.pop("", [])
    absent = sorted(set(router_map) - set(keys))
    for router in set(everybody) - set(request.routers):
        keys_of.pop(router, None)
    not_routers = [r for r in keys_of if request.routers and r not in request.routers]
    twice = [router for router, matches in keys_of.items() if len(matches) > 1]
    if (unknown and not request.router_map) or absent or not_routers or twice or not keys_of:
        raise RecordingError(
            f"{path.name}: cannot tell which array is which router: found {_listed(keys)}; "
            f"expected {_listed(request.routers) or 'a router map'}"
            + (f"; the map names {_listed(absent)}, which the file lacks" if absent else "")
            + (f"; {_listed(not_routers)}: no such router" if not_routers else "")
            + (f"; several arrays for {_listed(twice)}" if twice else "")
            + ".",
            _renaming(sorted(set(keys) - set(names), key=natural), request.routers),
        )
    order = request.routers or tuple(keys_of)
    return {router: keys_of[router][0] for router in order if router in keys_of}


def assign_layers(
    path: Path, key: str, layers: Sequence[Rows], request: Request
) -> dict[str, Rows]:
    """The layers of one array as those of the routers, in the checkpoint's order."""
    if len(layers) == 1:
        (router,) = assign_routers(path, (key,), request)
        return {router: layers[0]}
    everybody = tuple(one.name for one in request.checkpoint_routers)
    if len(layers) == len(everybody):
        of_layer = dict(zip(everybody, layers, strict=True))
        return {router: of_layer[router] for router in request.routers}
    if len(layers) != len(request.routers):
        shape = (len(layers), layers[0].num_rows, *layers[0].row_shape)
        raise RecordingError(
            f"{path.name}: {key} has shape {shape}, {number_of(len(layers), 'layer')}; expected "
            f"one for each router that is looked at: {_listed(request.routers)}.",
            _other_layers(key, layers, request),
        )
    return dict(zip(request.routers, layers, strict=True))


def expanded(router_map: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """A router map in which ``layer{i}=text/{i}`` has become an entry for each such key.

    A pattern that no key follows stays as it is, and is missed like any other key.
    """
    entries: dict[str, str] = {}
    for key, router in router_map.items():
        before, number, after = key.partition("{i}")
        pattern = re.compile(re.escape(before) + r"([0-9]{1,5})" + re.escape(after))
        numbers = [(k, m[1]) for k in keys if number and (m := pattern.fullmatch(k))]
        entries |= {k: router.replace("{i}", str(int(digits))) for k, digits in numbers}
        if not numbers:
            entries[key] = router
    return entries


#: Characters of the name of an array that a message shows.
_NAME_LENGTH = 60


def _renaming(unknown: Sequence[str], routers: Sequence[str]) -> str:
    """The --map to suggest, guessed from numbers in the keys."""
    parts = [re.fullmatch(r"(.*?)([0-9]{1,5})(.*)", key, re.DOTALL) for key in unknown]
    numbered = [m for m in parts if m is not None]
    shapes = {(m[1], m[3]) for m in numbered}
    stacks = {router.partition("/")[0] for router in routers}
    if len(numbered) == len(unknown) == len(routers) and len(shapes) == len(stacks) == 1:
        (before, after), (stack,) = shapes.pop(), stacks
        if {f"{stack}/{int(m[2])}" for m in numbered} == set(routers):
            return f"Add --map {shlex.quote(f'{before}{{i}}{after}={stack}/{{i}}')}."
    if unknown and len(unknown) == len(routers) and max(map(len, unknown)) <= _NAME_LENGTH:
        pairs = [shlex.quote(f"{k}={r}") for k, r in zip(unknown, routers, strict=True)]
        return f"If they are in this order, add {' '.join(f'--map {pair}' for pair in pairs)}."
    return (
        "Name the arrays after the routers (text.3 for text/3), or say which is which with --map "
        "KEY=ROUTER for each, or one --map 'layer{i}=text/{i}'; one array [layers, tokens, width] "
        "needs neither."
    )


def foreign_source(
    path: Path,
    request: Request,
    rows: Mapping[str, Rows],
    columns: Mapping[str, Rows],
    size_bytes: int | None = None,
    notes: tuple[str, ...] = (),
) -> StoredSource:
    """The token source made of ``rows`` (by router) and ``columns`` (by name, one wide).

    ``size_bytes`` None is the size of the file at ``path``; ``notes`` are those of its facts.
    """
    stage, tensor = foreign_tensor(path, request)
    first = next(iter(rows))
    num_tokens = rows[first].num_rows
    for name, values in {**rows, **columns}.items():
        if values.num_rows != num_tokens:
            raise RecordingError(
                f"{path.name}: {name} has {number_of(values.num_rows, 'token')}; {first} has "
                f"{num_tokens}."
            )
    documents = document_runs(columns["document"]) if "document" in columns else None
    facts = SourceFacts(
        name=path.resolve().name,
        stage=stage,
        num_tokens=num_tokens,
        routers=tuple(rows),
        domains=(),
        has_documents=documents is not None,
        has_chosen=not tensor.is_float,
        num_documents=None if documents is None else documents.num_documents,
        size_bytes=path.stat().st_size if size_bytes is None else size_bytes,
        notes=notes,
    )
    tensors = {router: {tensor.name: values} for router, values in rows.items()}
    token_columns = RowColumns(columns, documents) if columns else UnknownColumns()
    return StoredSource(facts, tensors, token_columns)


@dataclass(frozen=True)
class DocumentRuns:
    """Number of documents, and the start of the document at the start of each block of tokens.

    ``num_documents`` is None where more than are counted come in no order. ``begun`` has for every
    block of ``_BLOCK`` tokens the first token of the run that its first token is in.
    """

    num_documents: int | None
    is_in_pieces: bool
    begun: Int64[np.ndarray, " blocks"]

    def columns(self, rows: Rows, start: int, stop: int) -> Int64[np.ndarray, "2 tokens"]:
        """Documents, and positions in them; -1 where some document does not stand in one piece."""
        first = start // _BLOCK * _BLOCK if self.is_in_pieces else start
        document = _documents(rows, first, stop)
        position = np.full(stop - start, -1)
        if self.is_in_pieces and start < stop:
            token = np.arange(first, stop)
            begun = np.where(_is_new(document, document[0]), token, self.begun[first // _BLOCK])
            position = (token - np.maximum.accumulate(begun))[start - first :]
        return np.stack([document[start - first :], position])


def document_runs(rows: Rows) -> DocumentRuns:
    """The runs of the column ``document``, which is read a piece at a time."""
    begun = np.zeros(-(-rows.num_rows // _BLOCK), np.int64)
    num_runs, is_sorted, last, run = 0, True, 0, 0
    for start in range(0, rows.num_rows, _PIECE):
        document = _documents(rows, start, min(start + _PIECE, rows.num_rows))
        is_new = _is_new(document, last)
        is_new[0] |= start == 0
        is_sorted &= bool((np.diff(document) >= 0).all() and (start == 0 or document[0] >= last))
        num_runs += int(is_new.sum())
        token = np.arange(start, start + len(document))
        runs = np.maximum.accumulate(np.where(is_new, token, run))
        begun[start // _BLOCK : -(-(start + len(document)) // _BLOCK)] = runs[::_BLOCK]
        last, run = int(document[-1]), int(runs[-1])
    num_documents = num_runs if is_sorted else _num_distinct(rows)
    return DocumentRuns(num_documents, num_documents == num_runs, begun)


def _documents(rows: Rows, start: int, stop: int) -> Int64[np.ndarray, " tokens"]:
    return read_rows(rows, start, stop, DTYPES["document"]).reshape(-1)


def _is_new(
    document: Int64[np.ndarray, " tokens"], before: int | np.integer
) -> Bool[np.ndarray, " tokens"]:
    """True where a token is of another document than the token before it."""
    return np.diff(document, prepend=np.int64(before)) != 0


def _num_distinct(rows: Rows) -> int | None:
    """Number of distinct documents, in any order; None beyond ``UNSORTED_DOCUMENTS``."""
    documents = np.zeros(0, np.int64)
    for start in range(0, rows.num_rows, _PIECE):
        piece = _documents(rows, start, min(start + _PIECE, rows.num_rows))
        documents = np.union1d(documents, piece)
        if len(documents) > UNSORTED_DOCUMENTS:
            return None
    return len(documents)


class RowColumns(ColumnSource):
    """Token columns read from arrays one wide; -1 for those that are not there.

    Positions that are not there follow from the documents, where each stands in one piece.
    """

    def __init__(self, rows: Mapping[str, Rows], documents: DocumentRuns | None = None) -> None:
        self._rows = rows
        self._documents = documents

    def read(self, start: int, stop: int) -> TokenColumns:
        """Columns of tokens ``[start, stop)``."""
        columns = dict(vars(unknown_columns(stop - start)))
        arrays = dict(self._rows)
        if self._documents is not None and "position" not in arrays:
            documents = self._documents.columns(arrays.pop("document"), start, stop)
            columns["document"], columns["position"] = documents[0], documents[1].astype(np.int32)
        for name, rows in arrays.items():
            columns[name] = read_rows(rows, start, stop, DTYPES[name]).reshape(-1)
        return TokenColumns(**columns)


# ------------------------------------------------------------------------------------ safetensors


@dataclass(frozen=True)
class TensorFile:
    """One open safetensors file, whose tensors are rows on disk."""

    path: Path
    file: SafetensorsFile

    @property
    def names(self) -> Collection[str]:
        """The tensors in it."""
        return self.file.names()

    def rows(
        self, name: str, allowed: Collection[np.dtype], row: tuple[str, ...] = ("width",)
    ) -> FileRows:
        """A tensor that lies inside the file and has an allowed dtype.

        ``row`` names its dimensions after the first, which is tokens; rows are one wide without.
        """
        with as_recording_error():
            info = self.file.info(name)
        stored = STORED_DTYPES.get(info.dtype)
        if stored is None or stored.numpy is None or stored.numpy not in allowed:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' is {info.dtype}; "
                f"expected {' or '.join(str(dtype) for dtype in allowed)}."
            )
        if len(info.shape) != 1 + len(row) or 0 in info.shape:
            raise RecordingError(
                f"{self.path.name}: tensor '{name}' has shape {info.shape}; "
                f"expected ({', '.join(('tokens', *row))}).",
                flattening("array", len(info.shape)) if row == ("width",) else "",
            )
        num_rows, *row_shape = info.shape
        return FileRows(self.path, info.offset, stored.numpy, num_rows, tuple(row_shape or (1,)))


def open_tensor_file(path: Path) -> TensorFile:
    """The file, its header parsed and its length checked against the header."""
    if not path.exists():
        raise RecordingError(f"{path.name} is missing.", "Copy the whole recording.")
    opened = SafetensorsFile(CountingFile(path, path.name, ReadLog()))
    with as_recording_error():
        opened.names()
    return TensorFile(path, opened)


def _listed(names: Collection[str]) -> str:
    cut = [n if len(n) <= _NAME_LENGTH else f"{n[:_NAME_LENGTH]}..." for n in list(names)[:12]]
    text = ", ".join(cut)
    return text + (f" and {len(names) - 12} more" if len(names) > 12 else "")
