"""The checkpoint at a path, whatever its format."""

from __future__ import annotations

from pathlib import Path

from moegeom.checkpoint.folder import Location, local
from moegeom.checkpoint.store import Format, TensorStore
from moegeom.core.errors import CheckpointError
from moegeom.core.registry import Registry

FORMATS: Registry[Format] = Registry("format", "moegeom.checkpoint.formats", "FORMAT", Format)

#: Weight files of formats that are not read yet, by the end of their names.
_OTHER_WEIGHTS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch pickles",
    ".pt": "PyTorch pickles",
    ".pth": "PyTorch pickles",
    ".ckpt": "PyTorch pickles",
    ".distcp": "a torch distributed checkpoint",
    ".npz": "NumPy arrays",
    ".h5": "HDF5",
    ".msgpack": "Flax",
}


def open_checkpoint(path: str | Path) -> TensorStore:
    """The tensors of a checkpoint, by name, without reading them.

    Parameters
    ----------
    path
        A folder, a weight file, or an index json.

    Raises
    ------
    CheckpointError
        If nothing readable is there.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError(
                f"{path}: there is no such file or folder.",
                "A model of a hub must be downloaded first (hf download NAME --local-dir FOLDER).",
            )
        location = local(path)
        for candidate in FORMATS.all():
            if candidate.recognises(location):
                return candidate.open(location)
        raise CheckpointError(*_not_recognised(location))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None


def _not_recognised(location: Location) -> tuple[str, str]:
    files = location.files
    known = ", ".join(FORMATS.names())
    for file in files:
        kind = next((k for s, k in _OTHER_WEIGHTS.items() if file.endswith(s)), None)
        if kind:
            return f"{location.label}: holds {kind} ({file}); only {known} is read for now.", (
                "Convert the checkpoint to safetensors, or pass a folder that holds it."
            )
    found = ", ".join(files[:5]) or "nothing"
    return f"{location.label}: found {found}, expected a {known} checkpoint.", (
        "Pass the folder with config.json and *.safetensors."
    )
