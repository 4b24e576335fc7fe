"""The checkpoint at a path or a URL, whatever its format."""

from __future__ import annotations

from pathlib import Path

from moegeom.checkpoint.folder import Location, local
from moegeom.checkpoint.inner import inner_hint
from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.checkpoint.remote.url import scheme_of, shown
from moegeom.checkpoint.store import Format, TensorStore
from moegeom.core.errors import CheckpointError, UsageError, about
from moegeom.core.registry import Registry

FORMATS: Registry[Format] = Registry("format", "moegeom.checkpoint.formats", "FORMAT", Format)

#: Weight files of formats that are not read yet, by the end of their names.
_OTHER_WEIGHTS = {
    ".npz": "NumPy arrays",
    ".h5": "HDF5",
    ".msgpack": "Flax",
}


def open_checkpoint(path: str | Path, remote: RemoteOptions | None = None) -> TensorStore:
    """The tensors of a checkpoint, by name, without reading them.

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
        If the path is empty.
    """
    if path == "":
        raise UsageError("The path of the checkpoint is empty.", "The folder you are in is '.'.")
    url = path if isinstance(path, str) and scheme_of(path) else ""
    where = shown(url) if url else path
    with about("checkpoint", where):
        try:
            location = _remote(url, remote) if url else _local(Path(path))
            for candidate in FORMATS.all():
                if candidate.recognises(location):
                    return candidate.open(location)
            raise CheckpointError(*_not_recognised(location))
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read ({error.strerror}).") from None


def _local(path: Path) -> Location:
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no such file or folder.",
            "A model of the hub need not be downloaded first: pass hf://OWNER/NAME.",
        )
    return local(path)


def _remote(url: str, options: RemoteOptions | None) -> Location:
    # Most checkpoints lie on a disk: what only a URL needs is imported for URLs.
    from moegeom.checkpoint.remote.open import open_remote

    return open_remote(url, RemoteOptions() if options is None else options)


def _not_recognised(location: Location) -> tuple[str, str]:
    files = location.files
    known = ", ".join(FORMATS.names())
    for file in files:
        kind = next((k for s, k in _OTHER_WEIGHTS.items() if file.endswith(s)), None)
        if kind:
            return f"{location.label}: holds {kind} ({file}); only {known} are read for now.", (
                "Convert the checkpoint to safetensors, or pass a folder that holds it."
            )
    found = f"found {', '.join(files[:5])}" if files else "no file in it"
    return f"{location.label}: {found}; expected a checkpoint of {known}.", (
        (inner_hint(location.folder) if location.file is None else "")
        or "Pass the folder with config.json and *.safetensors."
    )
