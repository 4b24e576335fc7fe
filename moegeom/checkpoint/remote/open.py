"""The location that a URL names, over HTTP, of the Hugging Face hub, or through fsspec."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from moegeom.checkpoint.reading import Location, local
from moegeom.checkpoint.remote.folder import (
    Absent,
    RemoteFolder,
    Stamp,
    Transport,
    TryAgain,
    with_retries,
)
from moegeom.checkpoint.remote.url import (
    RemoteOptions,
    child,
    cut,
    hub_url,
    scheme_of,
    shown,
    split_last,
)
from moegeom.core.errors import CheckpointError
from moegeom.core.extras import install_command
from moegeom.core.limits import REMOTE_BYTES_PER_S, REMOTE_NAME_LENGTH, REMOTE_REDIRECTS

if TYPE_CHECKING:
    import httpx2


# --------------------------------------------------------------------------------------------- HTTP
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_UNSATISFIED = re.compile(r"bytes \*/(\d{1,19})")

#: Statuses that may pass.
PASSING = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Refusals:
    """Hints for statuses that will not pass."""

    denied: str = "Check user, password or signature in the URL; a signed link may have expired."
    missing: str = "Check the address, and that the upload is complete."


class HttpTransport(Transport):
    """Files at ``address(name)``, read by ranges over connections that are kept open."""

    def __init__(
        self,
        address: Callable[[str], str],
        options: RemoteOptions,
        headers: Mapping[str, str] | None = None,
        refusals: Refusals = Refusals(),
    ) -> None:
        import httpx2

        self._address = address
        self._options = options
        self._refusals = refusals
        self._client = httpx2.Client(
            headers={**(headers or {}), "Accept-Encoding": "identity"},
            follow_redirects=False,
            timeout=options.timeout_s,
            limits=httpx2.Limits(
                max_connections=options.num_parallel, max_keepalive_connections=options.num_parallel
            ),
        )
        weakref.finalize(self, self._client.close)

    def shown(self, name: str) -> str:
        return shown(self._address(name))

    def key(self, name: str) -> str:
        return self._address(name)

    def probe(self, name: str, size: int) -> tuple[Stamp, bytes]:
        raw, stamp = self._get(name, 0, size, is_probe=True)
        return stamp, raw

    def read(self, name: str, offset: int, size: int) -> tuple[bytes, Stamp]:
        return self._get(name, offset, size, is_probe=False)

    def _get(self, name: str, offset: int, size: int, is_probe: bool) -> tuple[bytes, Stamp]:
        import httpx2

        headers = {"Range": f"bytes={offset}-{offset + size - 1}"}
        try:
            with self._stream(name, headers) as response:
                stamp, expected = self._check(response, name, offset, size, is_probe)
                return self._body(response, name, expected), stamp
        except httpx2.TimeoutException:
            raise TryAgain(f"sent nothing for {self._options.timeout_s:g} s") from None
        # ValueError: a name of a host that no name server could be asked for
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL, ValueError) as error:
            raise CheckpointError(
                f"{self.where(name)} cannot be followed ({type(error).__name__}).",
                "Check the address.",
            ) from None
        except httpx2.ConnectError:
            raise TryAgain("cannot be reached") from None
        except httpx2.HTTPError as error:
            raise TryAgain(f"broke off ({type(error).__name__})") from None

    @contextmanager
    def _stream(self, name: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """The answer before its body, after redirects, whose bodies the client would read whole."""
        request = self._client.build_request("GET", self._address(name), headers=headers)
        for _ in range(REMOTE_REDIRECTS):
            response = self._client.send(request, stream=True)
            try:
                if response.next_request is None:
                    yield response
                    return
                request = response.next_request
            finally:
                response.close()
        raise CheckpointError(
            f"{self.where(name)} redirects more than {REMOTE_REDIRECTS} times.",
            "Check the address.",
        )

    def _check(
        self, response: httpx2.Response, name: str, offset: int, size: int, is_probe: bool
    ) -> tuple[Stamp, int]:
        """Version of the file and bytes of the body; an error unless the body is what was asked."""
        status = response.status_code
        etag = response.headers.get("ETag", "")
        modified = response.headers.get("Last-Modified", "")
        extent = response.headers.get("Content-Range", "")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise CheckpointError(f"{self.where(name)} is sent compressed, which was not asked.")
        if status == HTTPStatus.PARTIAL_CONTENT:
            first, last, total = _numbers(_CONTENT_RANGE, extent, 3) or (-1, -1, -1)
            if first != offset or last != min(offset + size, total) - 1:
                raise CheckpointError(
                    f"{self.where(name)} answers with the range {extent[:80]!r}, expected bytes "
                    f"{offset} to {offset + size - 1}."
                )
            return Stamp(total, etag, modified), last + 1 - first
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            (total,) = _numbers(_UNSATISFIED, extent, 1) or (0,)
            return Stamp(total, etag, modified), 0
        if status == HTTPStatus.OK:
            return self._check_whole(response, name, size if offset == 0 else -1, is_probe)
        raise self._refusal(response, name)

    def _check_whole(
        self, response: httpx2.Response, name: str, size: int, is_probe: bool
    ) -> tuple[Stamp, int]:
        """For a server without ranges: fine for a whole file, and for its size."""
        length = response.headers.get("Content-Length", "")
        total = int(length) if re.fullmatch(r"\d{1,19}", length) else -1
        etag, modified = (response.headers.get(h, "") for h in ("ETag", "Last-Modified"))
        if is_probe and total >= 0:
            return Stamp(total, etag, modified), 0
        if not is_probe and size >= 0 and (total == size or not length):
            return Stamp(size, etag, modified), size
        raise self._whole_file(name)

    def _whole_file(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where(name)} answers with the whole file where a part was asked for.",
            "Download the checkpoint: this server cannot send parts of files.",
        )

    def _refusal(self, response: httpx2.Response, name: str) -> Exception:
        answer = f"answers {response.status_code}{_phrase(response.status_code)}"
        if response.status_code in PASSING:
            return TryAgain(answer, retry_after(response.headers.get("Retry-After", "")))
        message = f"{self.where(name)} {answer}."
        if response.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return Absent(message, self._refusals.missing)
        if response.status_code == HTTPStatus.FORBIDDEN:
            # Buckets without permission to list answer so for files that do not exist.
            return Absent(message, self._refusals.denied)
        return CheckpointError(message, self._refusals.denied)

    def _body(self, response: httpx2.Response, name: str, expected: int) -> bytes:
        """The body as sent, which may not be longer than expected."""
        if expected == 0:
            return b""
        deadline = time.monotonic() + self._options.timeout_s + expected / REMOTE_BYTES_PER_S
        parts: list[bytes] = []
        missing = expected
        for part in response.iter_raw():
            parts.append(part)
            missing -= len(part)
            if missing < 0:
                raise self._whole_file(name)
            if time.monotonic() > deadline:
                break
        if missing:
            raise TryAgain(f"sent {expected - missing} of {expected} bytes")
        return b"".join(parts)


def _numbers(pattern: re.Pattern[str], text: str, count: int) -> tuple[int, ...] | None:
    match = pattern.fullmatch(text)
    return tuple(int(match[i + 1]) for i in range(count)) if match else None


def _phrase(status: int) -> str:
    try:
        return f" ({HTTPStatus(status).phrase})"
    except ValueError:
        return ""


def retry_after(text: str) -> float | None:
    """Seconds to wait by a Retry-After header, in seconds or as a date; None for anything else."""
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


# ----------------------------------------------------------------------------- the Hugging Face hub
#: ``refs/pr/1`` and ``refs/convert/...`` are revisions with slashes; a branch's are written %2F.
_HUB_URL = re.compile(
    r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?P<path>/.*)?",
    re.DOTALL,
)

_LOG_IN = "Is the model gated or private? Accept its terms on its page, then run: hf auth login"

_REFUSALS = Refusals(denied=_LOG_IN, missing="Check the name of the model and the revision.")


@dataclass(frozen=True)
class HubAddress:
    """A model, one of its revisions ("" for the main one), and a path in it ("" for all)."""

    repo: str
    revision: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class _PinnedTransport(HttpTransport):
    """Files of one commit, whose versions the listing tells: a CDN has ETags of its own."""

    def probe(self, name: str, size: int) -> tuple[Stamp, bytes]:
        stamp, raw = super().probe(name, size)
        return _only_size(stamp), raw

    def read(self, name: str, offset: int, size: int) -> tuple[bytes, Stamp]:
        raw, stamp = super().read(name, offset, size)
        return raw, _only_size(stamp)


def _only_size(stamp: Stamp) -> Stamp:
    return replace(stamp, etag="", modified="")


def parse_hub_url(url: str) -> HubAddress:
    """The parts of an ``hf://`` URL of a model."""
    match = _HUB_URL.fullmatch(url)
    if match is None or match["repo"].startswith(("datasets/", "spaces/")):
        raise CheckpointError(
            f"{cut(url)}: is no address of a model, expected hf://owner/name, "
            "hf://owner/name@revision or a folder or file in it."
        )
    path = (match["path"] or "").strip("/")
    return HubAddress(match["repo"], unquote(match["revision"] or ""), path)


def open_hub(url: str, options: RemoteOptions) -> Location:
    """A folder of a model, or one file of it, at the commit that the hub names now."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    address = parse_hub_url(url)
    api = HfApi(endpoint=options.hub_endpoint, token=options.hub_token)
    commit, files = _list_model(api, address, options)
    path = address.path
    folder, _, file = path.rpartition("/") if path in files else (path, "", "")
    prefix = f"{folder}/" if folder else ""
    inside = {n.removeprefix(prefix): s for n, s in files.items() if n.startswith(prefix)}
    if not inside:
        raise CheckpointError(
            f"{address.label}: holds no folder or file {path!r} at commit {commit[:12]}.",
            "Check the path in the model.",
        )

    def at(name: str) -> str:
        return hf_hub_url(address.repo, prefix + name, revision=commit, endpoint=api.endpoint)

    transport = _PinnedTransport(at, options, build_hf_headers(token=options.hub_token), _REFUSALS)
    return Location(RemoteFolder(address.label, transport, options, inside, commit), file or None)


def _list_model(
    api: Any, address: HubAddress, options: RemoteOptions
) -> tuple[str, dict[str, Stamp]]:
    """The commit, and size and object id of every file; one request."""
    info = with_retries(lambda: _ask(api, address, options), f"hf://{address.label}", options)
    if not isinstance(info.sha, str) or not info.siblings:
        raise CheckpointError(f"hf://{address.label}: the hub lists no commit or no file.")
    files = {}
    for sibling in info.siblings:
        if type(sibling.size) is not int or sibling.size < 0:
            raise CheckpointError(f"hf://{address.label}: {sibling.rfilename} has no size.")
        oid = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        files[sibling.rfilename] = Stamp(sibling.size, oid)
    return info.sha, files


def _ask(api: Any, address: HubAddress, options: RemoteOptions) -> Any:
    from httpx2 import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return api.model_info(
            address.repo,
            revision=address.revision or None,
            files_metadata=True,
            timeout=options.timeout_s,
        )
    except HfHubHTTPError as error:
        _refuse(error, address)
    except HFValidationError:
        raise CheckpointError(f"hf://{address.label}: is no name of a model.") from None
    except OfflineModeIsEnabled:
        raise CheckpointError(
            f"hf://{address.label}: cannot be read, huggingface_hub is in offline mode.",
            "Unset HF_HUB_OFFLINE.",
        ) from None
    except HTTPError as error:
        raise TryAgain(f"cannot be reached ({type(error).__name__})") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"hf://{address.label}: the hub answers with a description that makes no sense.",
            "Is HF_ENDPOINT the address of a hub?",
        ) from None


def _refuse(error: Any, address: HubAddress) -> NoReturn:
    """What a status of the hub means; it answers 401 for models that do not exist, too."""
    status = error.response.status_code
    if status in PASSING:
        wait = retry_after(error.response.headers.get("Retry-After", ""))
        raise TryAgain(f"answers {status}", wait) from None
    hint = _LOG_IN if status in (401, 403) else _REFUSALS.missing
    kind = type(error).__name__.removesuffix("Error")
    raise CheckpointError(f"hf://{address.label} answers {status} ({kind}).", hint) from None


# ------------------------------------------------------------------------------------------- fsspec
#: How file systems call the two in their listings.
_ETAGS = ("ETag", "etag", "e_tag")
_MODIFIED = ("LastModified", "last_modified", "updated", "modified", "mtime", "created")

#: Packages by scheme, for the hint; fsspec brings those of the standard library only.
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
    "webhdfs": "requests", "hdfs": "pyarrow",
}  # fmt: skip


class FsspecTransport(Transport):
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
            self.where(name), lambda: self._system.cat_file(path, start=offset, end=offset + size)
        )
        stamp = self._stamp(name)
        if len(raw) < size and offset + size <= stamp.size:
            raise TryAgain(f"sent {len(raw)} of {size} bytes")
        return raw, stamp

    def _stamp(self, name: str) -> Stamp:
        path = self._path(name)
        info = _attempt(self.where(name), lambda: self._system.info(path))
        return stamp_of(info, self.where(name))

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


# ------------------------------------------------------------------------------------------ any URL
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
    url = hub_url(url)
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
