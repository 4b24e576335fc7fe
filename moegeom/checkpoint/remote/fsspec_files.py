"""Every other URL, such as ``s3://``, through fsspec, which finds credentials itself."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from moegeom.checkpoint.folder import Location
from moegeom.checkpoint.remote.folder import RemoteFolder
from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.checkpoint.remote.transport import Absent, Stamp, TryAgain, with_retries
from moegeom.checkpoint.remote.url import scheme_of, shown
from moegeom.core.errors import CheckpointError

#: How file systems call the two in their listings.
_ETAGS = ("ETag", "etag", "e_tag")
_MODIFIED = ("LastModified", "last_modified", "updated", "modified", "mtime", "created")

#: Packages by scheme, for the hint; fsspec brings those of the standard library only.
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
    "webhdfs": "requests", "hdfs": "pyarrow",
}  # fmt: skip


class FsspecTransport:
    """Files of one folder of an fsspec file system, which must not cache listings."""

    def __init__(self, system: Any, folder: str, url: str) -> None:
        self._system = system
        self._folder = folder
        self._url = url.rstrip("/")

    def shown(self, name: str) -> str:
        return f"{shown(self._url)}/{name}"

    def key(self, name: str) -> str:
        return f"{self._url}/{name}"

    def probe(self, name: str, size: int) -> tuple[Stamp, bytes]:
        return self._stamp(name), b""

    def read(self, name: str, offset: int, size: int) -> tuple[bytes, Stamp]:
        """Reads do not tell the version, so that it is asked for afterwards."""
        path = self._path(name)
        raw = _attempt(
            self._where(name), lambda: self._system.cat_file(path, start=offset, end=offset + size)
        )
        stamp = self._stamp(name)
        if len(raw) < size and offset + size <= stamp.size:
            raise TryAgain(f"sent {len(raw)} of {size} bytes")
        return raw, stamp

    def _stamp(self, name: str) -> Stamp:
        path = self._path(name)
        info = _attempt(self._where(name), lambda: self._system.info(path))
        return stamp_of(info, self._where(name))

    def _where(self, name: str) -> str:
        return f"{name}: {self.shown(name)}"

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"


def open_fsspec(url: str, options: RemoteOptions) -> Location:
    """The folder, or the file in it, that an fsspec URL names."""
    from fsspec.core import url_to_fs

    where = shown(url)
    try:
        system, path = url_to_fs(url, use_listings_cache=False)
    except ImportError:
        package = _PACKAGES.get(scheme_of(url), "its fsspec package")
        raise CheckpointError(
            f"{where}: needs a package that is not installed.", f"pip install {package}"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{where}: cannot be opened ({type(error).__name__}).",
            "Is the scheme one that fsspec knows, and are the credentials set up?",
        ) from None
    listing = _list(system, path, where, options)
    if list(listing) == [path.rstrip("/")]:
        folder, _, file = path.rstrip("/").rpartition("/")
        url = url.rstrip("/").rpartition("/")[0]
        listing = _list(system, folder, where, options)
    else:
        folder, file = path, ""
    inside = {full.rpartition("/")[2]: stamp for full, stamp in listing.items()}
    label = folder.rstrip("/").rpartition("/")[2] or where
    transport = FsspecTransport(system, folder, url)
    return Location(RemoteFolder(label, transport, options, inside), file or None)


def stamp_of(info: Mapping[str, Any], where: str) -> Stamp:
    """Size and version from what ``info`` and ``ls`` tell of a file."""
    size = info.get("size")
    if type(size) is not int or size < 0:
        raise CheckpointError(f"{where}: the file system does not tell its size.")
    etag = next((str(info[key]) for key in _ETAGS if info.get(key)), "")
    modified = next((info[key] for key in _MODIFIED if info.get(key)), "")
    # A listing and a single answer may differ in quotes around a tag, or give a date or seconds.
    if isinstance(modified, datetime):
        modified = modified.timestamp()
    return Stamp(size, etag.replace('"', ""), str(modified))


def _list(system: Any, path: str, where: str, options: RemoteOptions) -> dict[str, Stamp]:
    """Files by their whole path; folders are left out."""
    entries = with_retries(
        lambda: _attempt(where, lambda: system.ls(path, detail=True)), where, options
    )
    files = [entry for entry in entries if entry.get("type") == "file"]
    return {entry["name"].rstrip("/"): stamp_of(entry, where) for entry in files}


def _attempt(where: str, work: Any) -> Any:
    """What ``work`` returns. Texts of foreign errors are not repeated: some hold signed URLs."""
    try:
        return work()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise Absent(f"{where}: there is no such file or folder.", "Check the address.") from None
    except PermissionError:
        raise CheckpointError(
            f"{where}: access is denied.", "Check the credentials of this storage."
        ) from None
    except ImportError as error:
        raise CheckpointError(
            f"{where}: needs the package {error.name or 'of its storage'}, which is not installed."
        ) from None
    except OSError as error:
        raise TryAgain(f"cannot be read ({type(error).__name__})") from None
    except Exception as error:  # noqa: BLE001 - each storage has exceptions of its own
        raise CheckpointError(
            f"{where}: cannot be read ({type(error).__name__}).",
            "Are the credentials of this storage set up?",
        ) from None
