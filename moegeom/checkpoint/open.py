"""The checkpoint at a path or a URL, whatever its format."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from moegeom.checkpoint.adapters import ADAPTER_CONFIG, open_adapter
from moegeom.checkpoint.formats.pytorch import PytorchFile
from moegeom.checkpoint.formats.safetensors import SafetensorsFile
from moegeom.checkpoint.loaders import LoadedFiles, answers_of
from moegeom.checkpoint.ranks import of_rank_folders
from moegeom.checkpoint.reading import Folder, LocalFolder, Location, local
from moegeom.checkpoint.remote.url import RemoteOptions, scheme_of, shown
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore, join_shards
from moegeom.checkpoint.store import Format, TensorStore
from moegeom.core.errors import CheckpointError, UsageError, about
from moegeom.core.limits import FOLDERS, POINTER_BYTES
from moegeom.core.loaded_code import refuse_code_within
from moegeom.core.registry import Rooms
from moegeom.core.text import natural

FORMATS = Rooms("format", "moegeom.checkpoint.formats", Format)

_LOG = logging.getLogger(__name__)

_CONVERT = "Convert the checkpoint to safetensors, or pass a folder that holds it."
_SOURCE = "Pass the checkpoint that it was made from."

#: Files of formats that are not read yet, by their names: what they are, and what to do.
_OTHER_WEIGHTS = (
    (("*.npz",), "NumPy arrays", _CONVERT),
    (("*.h5", "*.hdf5", "*.keras"), "HDF5", _CONVERT),
    (("*.msgpack",), "Flax", _CONVERT),
    (("*.nemo",), "an archive of NeMo", "Unpack it (tar -xf FILE), and pass the weights in it."),
    (("*.onnx", "*.onnx_data", "*.onnx.data"), "a graph of ONNX", _SOURCE),
    (("openvino*.xml", "openvino*.bin"), "a graph of OpenVINO", _SOURCE),
    (("params_shard_*.bin",), "weights of MLC in the order of its kernels", _SOURCE),
    (
        ("manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA", "ocdbt.process_*"),
        "a checkpoint of Orbax",
        "Export it to safetensors with the tool that wrote it.",
    ),
)


def open_checkpoint(path: str | Path, remote: RemoteOptions | None = None) -> TensorStore:
    """The tensors of a checkpoint, by name, without reading them: of a folder what the first loader
    takes that takes anything of it.

    Parameters
    ----------
    path
        A folder, a weight file, or an index json: a path, ``hf://owner/name@revision``, or a URL
        with any other scheme (``https``, ``s3``, ...), of which only parts are fetched.
    remote
        Patience, parallelism and cache for URLs; the defaults of ``RemoteOptions`` when None.

    Raises
    ------
    CheckpointError
        If nothing readable is there.
    UsageError
        If the path is empty, or libraries would load code from what it names.
    """
    return open_place(path, remote)[1]


def open_place(
    path: str | Path, remote: RemoteOptions | None = None
) -> tuple[Location, TensorStore]:
    """The folder, or the file in it, that is named, and its checkpoint; the same errors."""
    if path == "":
        raise UsageError("The path of the checkpoint is empty.", "The folder you are in is '.'.")
    url = path if isinstance(path, str) and scheme_of(path) else ""
    where = shown(url) if url else path
    with about("checkpoint", where):
        try:
            location = _remote(url, remote or RemoteOptions()) if url else _local(Path(path))
            store = _open(location)
            _LOG.info("%s: opened", store.label)
            return location, store
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror}).") from None


def _open(location: Location) -> TensorStore:
    judged, folder = location, location.folder
    is_named = location.file is None or location.file.startswith("adapter_model.")
    if isinstance(folder, LocalFolder) and is_named and _is_adapter(folder):
        answer = functools.partial(LoadedFiles, "", config=ADAPTER_CONFIG)
        return open_adapter(folder, _open_base, lambda name: open_answer(folder, answer((name,))))
    if location.file is None and (first := next(answers_of(location.folder), None)):
        judged = Location(location.folder, first.entry or None)
    for place in (judged, *of_rank_folders(location)):
        for candidate in FORMATS.all():
            if candidate.recognises(place):
                return candidate.open(place)
    raise CheckpointError(*_not_recognised(location))


def _is_adapter(folder: Folder) -> bool:
    """Whether a folder holds an adapter, and no weights of a model beside it."""
    answers = answers_of(folder) if (is_one := folder.has(ADAPTER_CONFIG)) else ()
    files = (name for answer in answers for name in answer.files)
    return is_one and all(name.startswith("adapter_model") for name in files)


def _open_base(path: Path) -> TensorStore:
    location = _local(path)
    if _is_adapter(location.folder):
        raise CheckpointError(f"{location.label}: an adapter; the base of an adapter is a model.")
    return _open(location)


def open_answer(folder: Folder, answer: LoadedFiles) -> ShardedStore:
    """The checkpoint as a loader takes it; reads the header of every file."""
    files: dict[str, CheckpointShard] = {
        name: (SafetensorsFile if name.endswith(".safetensors") else PytorchFile)(folder.file(name))
        for name in answer.files
    }
    copies: dict[str, list[str]] = {}
    shard_of = join_shards(files, folder.num_parallel, copies)
    shard_of.update((name, holders[-1]) for name, holders in copies.items())
    return ShardedStore(folder, files, shard_of, config=answer.config, inner=answer.inner)


#: What people write for a model of the hub, with or without the host of its page.
_HUB_NAME = re.compile(r"(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<name>[\w.-]+/[\w.-]+)")


def _local(path: Path) -> Location:
    if not path.exists():
        on_hub = _HUB_NAME.fullmatch(path.as_posix())
        raise CheckpointError(
            f"{path}: there is no such file or folder.",
            "A model of the hub need not be downloaded first: pass "
            f"hf://{on_hub['name'] if on_hub else 'OWNER/NAME'}.",
        )
    refuse_code_within(path)
    return local(path)


def _remote(url: str, options: RemoteOptions) -> Location:
    # Most checkpoints lie on a disk: what only a URL needs is imported for URLs.
    from moegeom.checkpoint.remote.open import open_remote

    return open_remote(url, options)


def _not_recognised(location: Location) -> tuple[str, str]:
    files = location.files
    formats = ", ".join(FORMATS.names())
    for patterns, kind, hint in _OTHER_WEIGHTS:
        file = next((f for f in files if any(fnmatchcase(f, p) for p in patterns)), None)
        if file:
            return (
                f"{location.label}: holds {kind} ({file}); only {formats} are read for now.",
                hint,
            )
    contents = f"found {', '.join(files[:5])}" if files else "no file in it"
    return f"{location.label}: {contents}; expected a checkpoint of {formats}.", (
        (inner_hint(location.folder) if location.file is None else "")
        or "Pass the folder with config.json and *.safetensors."
    )


#: What only a folder with weights holds.
_MARKS = (
    ".metadata",
    "model_and_optim/.metadata",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "mp_rank_00_model_states.pt",
    "model_optim_rng.pt",
    "mp_rank_00/model_optim_rng.pt",
)

#: Files that say which folder is the newest (Megatron-LM, DeepSpeed), and how its name is made of
#: what they hold.
_POINTERS: dict[str, Callable[[str], str]] = {
    "latest_checkpointed_iteration.txt": lambda text: (
        f"iter_{text:0>7}" if text.isdecimal() else text
    ),
    "latest": lambda text: text,
}


def inner_hint(folder: Folder) -> str:
    """A sentence that names the folder to pass; empty when no folder in this one is known to."""
    if folder.num_parallel > 1:  # on a server, each look is a request
        return ""
    names = [name for name in folder.files() if not name.startswith(".")]
    newest = next((name for name in map(_pointed(folder), _POINTERS) if name in names), None)
    if newest is not None:
        return f"Pass the folder {newest!r} in it, which is the newest save."
    inner = [n for n in names[:FOLDERS] if any(folder.has(f"{n}/{mark}") for mark in _MARKS)]
    if not inner:
        return ""
    last = max(inner, key=natural)
    if len(inner) == 1:
        return f"Pass the folder {last!r} in it, which holds a checkpoint."
    return f"Pass one of the {len(inner)} folders in it that hold a checkpoint, such as {last!r}."


def _pointed(folder: Folder) -> Callable[[str], str | None]:
    def read(pointer: str) -> str | None:
        if not folder.has(pointer):
            return None
        try:
            text = folder.file(pointer).read_all(POINTER_BYTES).decode("ascii").strip()
        except (CheckpointError, UnicodeDecodeError):  # a folder, or a file of another kind
            return None
        return _POINTERS[pointer](text)

    return read
