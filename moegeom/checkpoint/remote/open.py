"""The location that a URL names, whatever its scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from moegeom.checkpoint.folder import Location, local
from moegeom.checkpoint.remote.folder import RemoteFolder
from moegeom.checkpoint.remote.fsspec_files import open_fsspec
from moegeom.checkpoint.remote.http import HttpTransport
from moegeom.checkpoint.remote.hub import open_hub
from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.checkpoint.remote.url import child, cut, scheme_of, shown, split_last
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from moegeom.core.limits import REMOTE_NAME_LENGTH

#: A web address that ends so is a file; any other is a folder. Names of models have dots, too.
_FILE_SUFFIXES = (
    ".safetensors", ".json", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack",
    ".distcp", ".metadata",
)  # fmt: skip


def open_remote(url: str, options: RemoteOptions) -> Location:
    """The folder or file at a URL; at most its listing is read.

    Raises
    ------
    CheckpointError
        If nothing is there, it may not be read, or a package for it is not installed.
    """
    longest = max(map(len, shown(url).split("/")))
    if longest > REMOTE_NAME_LENGTH:
        raise CheckpointError(f"{cut(shown(url))}: has a name of {longest} characters.")
    opener = _OPENERS.get(scheme_of(url), open_fsspec)
    try:
        return opener(url, options)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{cut(shown(url))}: needs the package {error.name}, which is not installed.",
            install_command("hub"),
        ) from None
    except ValueError:  # a port that is no number, brackets that do not close
        raise CheckpointError(f"{cut(shown(url))}: is no URL.", "Check the address.") from None


def _open_web(url: str, options: RemoteOptions) -> Location:
    """A file on a web server, or a folder whose files have well-known names."""
    folder, last = split_last(url)
    is_file = last.lower().endswith(_FILE_SUFFIXES)
    base = folder if is_file else url
    transport = HttpTransport(lambda name: child(base, name), options)
    label = unquote(split_last(base)[1]) or shown(base)
    location = RemoteFolder(label, transport, options, listing=None)
    return Location(location, unquote(last) if is_file else None)


def _open_disk(url: str, _: RemoteOptions) -> Location:
    path = Path(url2pathname(urlsplit(url).path))
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder.", "Check the path.")
    return local(path)


_OPENERS: dict[str, Callable[[str, RemoteOptions], Location]] = {
    "file": _open_disk,
    "hf": open_hub,
    "http": _open_web,
    "https": _open_web,
}
