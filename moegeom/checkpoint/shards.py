"""A checkpoint of one or many files: which file holds which tensor."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.json_text import parse_object
from moegeom.checkpoint.reading import Folder, Location, RangeFile, ReadLog
from moegeom.checkpoint.store import TensorInfo, check_apart, check_names, is_inside
from moegeom.core import limits
from moegeom.core.documents import value_at
from moegeom.core.errors import CheckpointError
from moegeom.core.shapes import Shaped

# Many tensors over a network: neighbours in one request, several requests at the same time.

S = TypeVar("S")
T = TypeVar("T")

#: Bytes between two tensors that are fetched along: cheaper than one more request.
_GAP_BYTES = 16 << 10

#: Spans are not grown beyond this; a tensor that is larger is a span of its own.
_SPAN_BYTES = 8 << 20


@dataclass(frozen=True)
class Span:
    """Tensors of one file that are fetched together."""

    infos: tuple[TensorInfo, ...]

    @property
    def file(self) -> str:
        return self.infos[0].file

    @property
    def offset(self) -> int:
        return self.infos[0].offset

    @property
    def size(self) -> int:
        return max(info.offset + info.size_bytes for info in self.infos) - self.offset


def join_neighbours(infos: Sequence[TensorInfo]) -> list[Span]:
    """Tensors in file order, joined where at most 16 KiB lie between them in one file."""
    spans: list[list[TensorInfo]] = []
    stop = 0
    for info in infos:
        first = spans[-1][0] if spans else info
        joined = max(stop, info.offset + info.size_bytes)
        if (
            spans
            and first.file == info.file
            and info.offset - stop <= _GAP_BYTES
            and joined - first.offset <= _SPAN_BYTES
        ):
            spans[-1].append(info)
            stop = joined
        else:
            spans.append([info])
            stop = info.offset + info.size_bytes
    return [Span(tuple(span)) for span in spans]


def in_parallel(work: Callable[[S], T], items: Iterable[S], num_parallel: int) -> Iterator[T]:
    """Results in the order of the items; at most ``2 * num_parallel`` wait to be consumed."""
    if num_parallel == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_parallel) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) == 2 * num_parallel:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


#: Files that describe a model: the first that is there counts.
CONFIGS = ("config.json", "params.json")


@dataclass(frozen=True)
class QuantisationPlace:
    """Where an engine reads which modules are quantised: a file, and the path to the table in it.

    ``usual`` is the key under which its writers list the modules that they leave alone. A file that
    is ``by_tensor`` names a format for each tensor instead.
    """

    file: str
    path: str = ""
    usual: str = "modules_to_not_convert"
    by_tensor: bool = False

    @property
    def name(self) -> str:
        """What to call the table in a sentence."""
        is_config = self.file == CONFIGS[0]
        return self.path if is_config else ": ".join(filter(None, (self.file, self.path)))


#: Every place, in the order in which most engines prefer them; which one counts depends on engine,
#: version and options. Read from the sources of transformers 5.23, vLLM (``get_quant_config``,
#: ``get_config_filenames``), SGLang (``_parse_quant_hf_config``, ``_find_quant_modelslim_config``),
#: mlx-lm (``load_model``) and TensorRT-LLM (``_torch/model_config``).
QUANTISATION_PLACES = (
    QuantisationPlace("config.json", "quantization_config"),
    QuantisationPlace("config.json", "compression_config", "ignore"),
    QuantisationPlace("config.json", "quantization"),
    QuantisationPlace("params.json", "quantization", "ignore"),
    QuantisationPlace("hf_quant_config.json", "quantization", "exclude_modules"),
    QuantisationPlace("hf_quant_config.json", "", "exclude_modules"),
    QuantisationPlace("quant_cfg.json", "", "exclude_modules"),
    QuantisationPlace("quantize_config.json"),
    QuantisationPlace("quant_config.json"),
    QuantisationPlace("quant_model_description.json", by_tensor=True),
)

#: The key under which a config that was read holds the files beside it, by their names.
FILES_BESIDE = "files beside the config"


class CheckpointShard(Protocol):
    """One file of a checkpoint, in any format."""

    @property
    def label(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    def names(self) -> Collection[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]: ...
    def read_bytes(self, name: str, start: int, size: int) -> bytes: ...


@dataclass(frozen=True)
class FileShard:
    """A shard that is one file."""

    file: RangeFile

    @property
    def label(self) -> str:
        return self.file.label

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes()


class HeadedShard(FileShard):
    """A file whose ``header``, which is read on first use, says where its tensors lie."""

    header: ClassVar[Any]

    def names(self) -> Collection[str]:
        return self.header.entries.keys()

    def info(self, name: str) -> TensorInfo:
        return self.header.info(name)

    def kind_of(self, names: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape where all of them have the same, as far as that is known at once."""
        return None

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        info = self.info(name)
        where = f"{info.file}: tensor {name!r}"
        dtype = numpy_dtype(info.dtype, where)
        return as_array(self.file.read(info.offset, info.size_bytes), dtype, info.shape, where)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        info = self.info(name)
        length = max(min(size, info.size_bytes - start), 0)
        return self.file.read(info.offset + start, length)


class ShardedStore:
    """A ``TensorStore`` over shards; a shard's header is read when a tensor of it is needed."""

    def __init__(
        self,
        folder: Folder,
        shards: Mapping[str, CheckpointShard],
        shard_of: Mapping[str, str],
        index_bytes: int = 0,
        config: str = "",
        inner: str = "",
    ) -> None:
        self.folder = folder
        self._config_file, self._inner = config, inner
        self._index_bytes = index_bytes
        self.log: ReadLog = folder.log
        self._shards = shards
        self.shard_of = shard_of
        self._open: set[str] = set()  # files whose headers were read

    @property
    def label(self) -> str:
        return self.folder.label

    @property
    def bytes_read(self) -> int:
        return self.log.bytes_read

    @property
    def bytes_total(self) -> int:
        return self._total

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def revision(self) -> str:
        """The commit, or a digest of the ETags of the weight files; "" on a disk."""
        return self.folder.revision_of(self._shards)

    @cached_property
    def _total(self) -> int:
        config = self._config_file or config_file(self.folder)
        described = self._index_bytes + (self.folder.file(config).size_bytes() if config else 0)
        return described + sum(shard.size_bytes for shard in self._shards.values())

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        config = read_config(self.folder, self._config_file)
        # what the inner table says counts; the model keeps its type, and null says nothing
        laid_over = value_at(config, self._inner) if self._inner else {}
        says = {k: v for k, v in laid_over.items() if v is not None and k != "model_type"}
        return {**config, **says} if says else config

    def names(self) -> Collection[str]:
        return self.shard_of.keys()

    def info(self, name: str) -> TensorInfo:
        return self._shard(name).info(name)

    def is_open(self, name: str) -> bool:
        return self.shard_of.get(name) in self._open

    def are_alike(self, names: Collection[str]) -> bool:
        by_file: dict[str | None, list[str]] = defaultdict(list)
        for name in names:
            by_file[self.shard_of.get(name)].append(name)
        shards = [(file in self._open, self._shards.get(file or "")) for file in by_file]
        kinds = {
            shard.kind_of(some) if is_open and isinstance(shard, HeadedShard) else None
            for (is_open, shard), some in zip(shards, by_file.values(), strict=True)
        }
        return len(kinds) == 1 and None not in kinds

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        return self._shard(name).read(name)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self._shard(name).read_bytes(name, start, size)

    def prepare(self, names: Iterable[str]) -> None:
        """Open the headers of the shards that hold these tensors; a disk is not worth it."""
        if self.folder.num_parallel > 1:
            files = sorted({self.shard_of[name] for name in names if name in self.shard_of})
            shards = [self._shards[file] for file in files]
            for _ in in_parallel(lambda shard: shard.names(), shards, self.folder.num_parallel):
                pass

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        """Names and tensors in file order; from a server, neighbours with one request.

        No two may share bytes: each is kept in memory by who asks for it, and one block of rows
        is not the router of every layer.
        """
        each = (self.info(name) for name in dict.fromkeys(names))
        # a disk reads forward
        infos = sorted(each, key=lambda info: (info.file, info.offset, info.name))
        self._check_apart(infos)
        for span in in_parallel(self._read_span, join_neighbours(infos), self.folder.num_parallel):
            yield from span

    def _check_apart(self, infos: Iterable[TensorInfo]) -> None:
        # A tensor in pieces gives the place of the first; pieces are checked by their format.
        whole = (info for info in infos if info.file in self._shards)
        for file, tensors in groupby(whole, key=lambda info: info.file):
            check_apart(
                ((i.offset, i.offset + i.size_bytes, i.name) for i in tensors),
                file,
                hint="Save each tensor with a storage of its own: tensor.clone().",
            )

    def _read_span(self, span: Span) -> list[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        # A tensor in pieces lies in files of which the shard is made, not in the shard itself.
        is_joined = len(span.infos) > 1 and span.file in self._shards
        hold = self.folder.held(span.file, span.offset, span.size) if is_joined else nullcontext()
        with hold:
            return [(info.name, self.read(info.name)) for info in span.infos]

    def _shard(self, name: str) -> CheckpointShard:
        if name not in self.shard_of:
            raise CheckpointError(f"{self.label}: there is no tensor {name!r}.")
        shard = self._shards[self.shard_of[name]]
        if name not in shard.names():
            raise CheckpointError(
                f"{shard.label}: tensor {name!r} is missing; the index says that it is here.",
                "Do index and shards come from the same download?",
            )
        self._open.add(self.shard_of[name])
        return shard


def config_file(folder: Folder) -> str | None:
    """The name of the file that describes the model, None without one."""
    return next((name for name in CONFIGS if folder.has(name)), None)


def read_config(folder: Folder, name: str = "") -> Mapping[str, Any]:
    """The config of that name; else ``config.json`` of a folder, or ``params.json`` (original
    files); empty without any.

    Raises
    ------
    CheckpointError
        Where it cannot be read, or names other configs: which one counts depends on the loader.
    """
    name = name or config_file(folder) or ""
    if name and name not in folder.parsed:
        raw = folder.file(name).read_all(limits.CONFIG_BYTES)
        config = parse_object(raw, name, allow_constants=True)
        beside = _files_beside(folder, name, config)
        config.pop(FILES_BESIDE, None)
        folder.parsed[name] = config | {FILES_BESIDE: beside} if beside else config
        if others := folder.parsed[name].get("configuration_files"):
            raise CheckpointError(
                f"{name}: 'configuration_files' names {str(others)[:100]}: transformers reads "
                "one of them in its place, by its version.",
                f"Keep the config that counts as {name}, and remove the key.",
            )
    return folder.parsed.get(name, {})


def _files_beside(
    folder: Folder, name: str, config: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """The files that say what is quantised, by name, the config among them unless it is
    ``config.json``, whose tables may lie deeper.
    """
    files = dict.fromkeys(place.file for place in QUANTISATION_PLACES if place.file not in CONFIGS)
    tables = {name: config} if name != CONFIGS[0] else {}
    is_there = in_parallel(folder.has, files, folder.num_parallel)
    for file, there in zip(files, is_there, strict=True):
        if there:
            raw = folder.file(file).read_all(limits.INDEX_BYTES)
            tables[file] = parse_object(raw, file, allow_constants=True)
    return tables


def parse_index(folder: Folder, name: str) -> dict[str, str]:
    """File name by tensor name, from an index json; every file name stays inside the folder."""
    if name not in folder.parsed:
        folder.parsed[name] = _shard_of(folder.file(name))
    return folder.parsed[name]


def _shard_of(file: RangeFile) -> dict[str, str]:
    index = parse_object(file.read_all(limits.INDEX_BYTES), file.label)
    shard_of = index.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{file.label}: has no 'weight_map' from tensor to file.")
    check_names(shard_of, f"{file.label}:")
    if set(map(type, shard_of.values())) != {str}:
        raise CheckpointError(f"{file.label}: 'weight_map' holds a value that is no file name.")
    files = sorted(set(shard_of.values()))
    outside = next((name for name in files[: limits.FILES] if not is_inside(name)), None)
    if outside is not None:
        raise CheckpointError(
            f"{file.label}: names the file {outside[:200]!r}, which is outside the checkpoint's "
            "folder."
        )
    return shard_of


def missing_shards(
    folder: Folder, index: str, names: Collection[str]
) -> Mapping[str, MissingShard]:
    """Of the files that an index names, those that the folder does not hold.

    Raises ``CheckpointError`` if there are more than may be looked for.
    """
    if len(names) > limits.FILES:
        raise CheckpointError(
            f"{index}: names {len(names)} files, more than the {limits.FILES} allowed."
        )
    longest = max(names, key=len, default="")
    if len(longest) > limits.NAME_LENGTH:
        raise CheckpointError(
            f"{index}: names the file {longest[:80]!r}... of {len(longest)} characters, more than "
            f"the {limits.NAME_LENGTH} allowed."
        )
    listed = sorted(names)
    is_there = in_parallel(folder.has, listed, folder.num_parallel)
    missing = [name for name, there in zip(listed, is_there, strict=True) if not there]
    return {name: MissingShard(name, index, len(missing), len(names)) for name in missing}


@dataclass(frozen=True)
class MissingShard:
    """A shard that is not there, which only matters to who needs a tensor of it."""

    label: str
    index: str
    num_missing: int
    num_files: int
    size_bytes: int = 0

    def error(self) -> CheckpointError:
        verb = "is" if self.num_missing == 1 else "are"
        return CheckpointError(
            f"{self.index}: names {self.label!r}, which does not exist "
            f"({self.num_missing} of {self.num_files} files {verb} missing).",
            "Download the missing files.",
        )

    def names(self) -> NoReturn:
        raise self.error()

    def info(self, name: str) -> NoReturn:
        raise self.error()

    def read(self, name: str) -> NoReturn:
        raise self.error()

    def read_bytes(self, name: str, start: int, size: int) -> NoReturn:
        raise self.error()


def join_shards(
    shards: Mapping[str, CheckpointShard],
    num_parallel: int = 1,
    copies: dict[str, list[str]] | None = None,
) -> dict[str, str]:
    """File by tensor name for files without an index; reads every header.

    Where ``copies`` is given, a name may be in several files: it takes the further ones.
    """
    shard_of: dict[str, str] = {}
    name_lists = in_parallel(lambda shard: shard.names(), shards.values(), num_parallel)
    for file, names in zip(shards, name_lists, strict=True):
        for name in names:
            if name in shard_of and copies is not None:
                copies.setdefault(name, []).append(file)
                continue
            if name in shard_of:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is also in {shard_of[name]}, and there is no index.",
                    "Row slices would say so in their headers (DCP_SHARDING_INFO); pass one file.",
                )
            shard_of[name] = file
        if len(shard_of) > limits.TENSORS:
            raise CheckpointError(
                f"{file}: with this file there are {len(shard_of)} tensors, more than the "
                f"{limits.TENSORS} allowed."
            )
    return shard_of


# ---------------------------------------------------------------------------- files behind an index
@dataclass(frozen=True)
class Naming:
    """What the files of a format are called: its index, and what its writers prefer."""

    index_suffix: str
    index: str
    single: str


@dataclass(frozen=True)
class Chosen:
    """The index to read, or the files without one; ``rival`` stands beside an index."""

    index: str = ""
    files: Sequence[str] = ()
    rival: str = ""


def choose(location: Location, files: Sequence[str], naming: Naming) -> Chosen:
    """What to read of a location; ``files`` are those in it that hold weights.

    Raises
    ------
    CheckpointError
        If a folder holds several indexes, none of which has the usual name.
    """
    if location.file is not None:
        is_index = location.file.endswith(naming.index_suffix)
        return Chosen(index=location.file) if is_index else Chosen(files=[location.file])
    indexes = [name for name in location.files if name.endswith(naming.index_suffix)]
    named = [name for name in indexes if name == naming.index] or indexes
    single = [name for name in files if name == naming.single]
    if len(named) > 1:
        raise CheckpointError(
            f"{location.folder.label}: holds {len(named)} indexes ({', '.join(named)}).",
            "Pass the index to read.",
        )
    if named:
        return Chosen(index=named[0], rival=naming.single if single else "")
    return Chosen(files=single or files)


def open_index(
    folder: Folder, chosen: Chosen, open_file: Callable[[str], CheckpointShard]
) -> ShardedStore:
    """The checkpoint behind an index.

    Raises
    ------
    CheckpointError
        If none of the files that it names is there, or it does not name the single file beside
        it. A file that is missing is an error for who needs it.
    """
    index = folder.file(chosen.index)
    shard_of = parse_index(folder, chosen.index)
    used = sorted(set(shard_of.values()))
    if chosen.rival and chosen.rival not in used:
        # transformers would load the single file, others the shards: do not guess.
        raise CheckpointError(
            f"{folder.label}: holds both {chosen.rival} and {chosen.index}, "
            "which does not name it.",
            "Pass the file or the index to read.",
        )
    missing = missing_shards(folder, chosen.index, used)
    if len(missing) == len(used):
        raise missing[used[0]].error()
    shards = {name: missing.get(name) or open_file(name) for name in used}
    return ShardedStore(folder, shards, shard_of, index.size_bytes())


# ------------------------------------------------------------------------------------------- lazily
class lazy(Generic[T]):  # noqa: N801 - a decorator, as functools.cached_property
    """``functools.cached_property`` without its lock.

    Before Python 3.12 all objects of a class share that lock, so that headers of many shards would
    be fetched one after the other. Two threads that ask the same object at the same time may both
    compute the value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.name: str = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        # Python finds the value itself from now on: this class has no __set__.
        attribute = instance.__dict__[self.name] = self.compute(instance)
        return attribute
