"""A folder behind a URL, whose files are read by ranges, whatever transports them."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, Protocol, TypeVar

from moegeom.checkpoint.reading import ByteRange, ReadLog, read_whole
from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.core.errors import CheckpointError, OutputError
from moegeom.core.files import read_regular, write_whole
from moegeom.core.limits import REMOTE_READ_BYTES

# --------------------------------------------------------------------------------------- transports
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stamp:
    """Size of a file, and what tells its versions apart; "" where the server does not say."""

    size: int
    etag: str = ""
    modified: str = ""

    @property
    def is_exact(self) -> bool:
        """True when equal tags mean equal bytes: a weak ETag promises less."""
        return bool(self.etag) and not self.etag.startswith("W/")

    def differs(self, other: Stamp) -> bool:
        """True when the two cannot be of the same version; ETags decide where both have one."""
        if self.size != other.size:
            return True
        if self.etag and other.etag:
            return self.etag != other.etag
        return bool(self.modified and other.modified) and self.modified != other.modified


class TryAgain(Exception):
    """A failure that may pass; ``wait_s`` is the pause that the server asks for."""

    def __init__(self, outcome: str, wait_s: float | None = None) -> None:
        super().__init__(outcome)
        self.outcome = outcome
        self.wait_s = wait_s


class Absent(CheckpointError):
    """The file does not exist, or the server does not say whether it does."""


class Transport(Protocol):
    """A folder behind a URL. Each method makes one attempt, and raises ``TryAgain`` if it fails."""

    def shown(self, name: str) -> str:
        """The URL of a file as it may be printed."""
        ...

    def key(self, name: str) -> str:
        """What names a file among all files anywhere."""
        ...

    def where(self, name: str) -> str:
        """A file and its URL, in a sentence."""
        return f"{name}: {self.shown(name)}"

    def probe(self, name: str, size: int) -> tuple[Stamp, bytes]:
        """Size and version of a file, and its first ``size`` bytes where they came along.

        Raises ``Absent`` where there is none.
        """
        ...

    def read(self, name: str, offset: int, size: int) -> tuple[bytes, Stamp]:
        """Exactly ``size`` bytes that exist, and the version they are of."""
        ...


def with_retries(work: Callable[[], T], where: str, options: RemoteOptions) -> T:
    """What ``work`` returns, in the first attempt that does not raise ``TryAgain``.

    Raises
    ------
    CheckpointError
        When all attempts failed, or the server asks for a pause longer than the longest allowed.
    """
    for attempt in range(1, options.attempts):
        try:
            return work()
        except TryAgain as failure:
            pause = options.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            if failure.wait_s is not None:
                pause = max(pause, failure.wait_s)
            if pause > options.longest_wait_s:
                raise CheckpointError(
                    f"{where} {failure.outcome}, and asks to wait {pause:.0f} s.",
                    "Try again later, or download the checkpoint.",
                ) from None
        options.sleep(pause)
    try:
        return work()
    except TryAgain as failure:
        raise CheckpointError(
            f"{where} {failure.outcome}, in each of {options.attempts} attempts.",
            "Try again later, or download the checkpoint.",
        ) from None


# ------------------------------------------------------------------------------------------ folders
#: What a probe asks for: every header of safetensors begins with its length in 8 bytes.
_PROBE_BYTES = 8

#: What a folder that cannot be listed is asked for.
WELL_KNOWN = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "consolidated.safetensors",
)


@dataclass(frozen=True)
class RemoteFile:
    """A ``RangeFile`` of a remote folder."""

    folder: RemoteFolder
    label: str

    def size_bytes(self) -> int:
        """Length of the file when it was listed or first read."""
        return self.folder.stamp(self.label).size

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``; fewer is an error."""
        return self.folder.read(self.label, offset, size)

    def read_all(self, limit: int) -> bytes:
        """The whole file, which may not be longer than ``limit``."""
        return read_whole(self, limit)


class RemoteFolder:
    """A ``Folder`` over a transport: limits, retries, versions and cache are here.

    ``listing`` holds what lies directly in the folder; None when the server does not tell.
    ``commit`` names the state of all files where the server keeps states.
    """

    def __init__(
        self,
        label: str,
        transport: Transport,
        options: RemoteOptions,
        listing: Mapping[str, Stamp] | None,
        commit: str = "",
    ) -> None:
        self.label = label
        self.log: ReadLog = ReadLog()
        self.parsed: dict[str, Any] = {}
        self.num_parallel: int = options.num_parallel
        self._transport = transport
        self._options = options
        self._commit = commit
        self._listing = listing
        self._slots = BoundedSemaphore(options.num_parallel)
        self._lock = Lock()
        self._known: dict[str, Stamp | Absent] = dict(listing or {})
        self._held: dict[str, list[tuple[int, bytes]]] = {}
        folder = options.cache_folder
        self._cache = RangeCache(folder, options.cache_bytes) if folder else None

    def files(self) -> Sequence[str]:
        """Everything in the listing; without one, the well-known names that are there."""
        if self._listing is not None:
            return sorted(self._listing)
        with ThreadPoolExecutor(self.num_parallel) as pool:
            is_there = list(pool.map(self.has, WELL_KNOWN))
        names = [name for name, there in zip(WELL_KNOWN, is_there, strict=True) if there]
        if not names:
            first = self._known[WELL_KNOWN[0]]
            reason = first.message if isinstance(first, Absent) else ""
            raise CheckpointError(
                f"{self.label}: holds no file of a well-known name, and cannot be listed; {reason}",
                "Pass the URL of the weight file or of the index json.",
            )
        return sorted(names)

    def has(self, name: str) -> bool:
        """True when the file exists; costs a request where there is no listing."""
        return not isinstance(self._look_up(name), Absent)

    def file(self, name: str) -> RemoteFile:
        """The file of that name, which need not exist until it is read."""
        return RemoteFile(self, name)

    def stamp(self, name: str) -> Stamp:
        """Size and version of a file; an error when there is none."""
        entry = self._look_up(name)
        if isinstance(entry, Absent):
            raise entry
        return entry

    def revision_of(self, names: Collection[str]) -> str:
        """What names this state of the files: a commit, or a digest of their ETags.

        Of all files when none of these is there (pieces under another name). "" when the server
        tells neither for one of them.
        """
        if self._commit:
            return self._commit
        there = [name for name in names if self.has(name)]
        stamps = {name: self.stamp(name) for name in there or self.files()}
        if not all(stamp.etag for stamp in stamps.values()):
            return ""
        lines = "".join(f"{name}\0{stamps[name].etag}\n" for name in sorted(stamps))
        digest = hashlib.sha256(lines.encode("utf-8", "surrogatepass"))
        return f"etags:{digest.hexdigest()[:16]}"

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Exactly these bytes: from memory, from the cache, or from the server."""
        stamp = self.stamp(name)
        if offset + size > stamp.size:
            raise CheckpointError(
                f"{name}: truncated, bytes {offset} to {offset + size} were expected and the file "
                f"ends at {stamp.size}.",
                "Upload this file again.",
            )
        if size > REMOTE_READ_BYTES:
            raise CheckpointError(
                f"{name}: bytes {offset} to {offset + size} are more than the "
                f"{REMOTE_READ_BYTES} that "
                "are read at once from a server.",
                "Download the checkpoint.",
            )
        from_memory = self._find_held(name, offset, size)
        if from_memory is not None:
            return from_memory
        key = (self._transport.key(name), stamp.etag, str(offset), str(size))
        is_kept = self._cache is not None and stamp.is_exact
        cached = self._cache.get(key) if self._cache and is_kept else None
        if cached is not None and len(cached) == size:
            return cached
        raw = self._fetch(name, offset, size, stamp)
        if self._cache and is_kept:
            self._cache.put(key, raw)
        return raw

    @contextmanager
    def held(self, name: str, offset: int, size: int) -> Iterator[None]:
        """These bytes are fetched at once and stay in memory while the context is open."""
        span = (offset, self.read(name, offset, size))
        with self._lock:
            self._held.setdefault(name, []).append(span)
        try:
            yield
        finally:
            with self._lock:
                self._held[name] = [other for other in self._held[name] if other is not span]

    def _look_up(self, name: str) -> Stamp | Absent:
        with self._lock:
            entry = self._known.get(name)
        if entry is None:
            entry = self._probe(name)
            with self._lock:
                entry = self._known.setdefault(name, entry)
        return entry

    def _probe(self, name: str) -> Stamp | Absent:
        is_listed = self._listing is not None and "/" not in name
        # false for a name that no URL can spell: JSON may hold half of a surrogate pair
        if is_listed or any(0xD800 <= ord(letter) <= 0xDFFF for letter in name):
            return Absent(
                f"{name}: there is no such file in {self.label}.", "Is the upload complete?"
            )

        def attempt() -> tuple[Stamp, bytes]:
            with self._slots:
                return self._transport.probe(name, _PROBE_BYTES)

        try:
            stamp, raw = with_retries(attempt, self._transport.where(name), self._options)
        except Absent as error:
            return error
        if raw:
            with self._lock:
                self.log.ranges.append(ByteRange(name, 0, len(raw)))
                self._held.setdefault(name, []).append((0, raw))
        return stamp

    def _fetch(self, name: str, offset: int, size: int, stamp: Stamp) -> bytes:
        if size == 0:
            return b""

        def attempt() -> tuple[bytes, Stamp]:
            with self._slots:
                return self._transport.read(name, offset, size)

        where = self._transport.where(name)
        raw, seen = with_retries(attempt, where, self._options)
        _LOG.debug("%s: bytes %d to %d", where, offset, offset + len(raw))
        with self._lock:
            self.log.ranges.append(ByteRange(name, offset, len(raw)))
        if stamp.differs(seen) or len(raw) != size:
            raise CheckpointError(
                f"{where} changed while it was read.",
                "Wait until the upload is complete, and try again.",
            )
        return raw

    def _find_held(self, name: str, offset: int, size: int) -> bytes | None:
        with self._lock:
            spans = tuple(self._held.get(name, ()))
        for start, raw in spans:
            if start <= offset and offset + size <= start + len(raw):
                return raw[offset - start : offset - start + size]
        return None


#: Reads longer than this are not kept: they would push everything else out.
_CACHED_BYTES = 64_000_000

_DIGEST_SIZE = 32


@dataclass
class RangeCache:
    """Files named by the hash of what they hold; each begins with the hash of its content.

    A disk that is full or may not be written to is no error: nothing is kept then. A file that is
    not whole is not there.
    """

    folder: Path
    limit: int
    _lock: Lock = field(default_factory=Lock, repr=False)
    _filled: int | None = None

    def get(self, key: tuple[str, ...]) -> bytes | None:
        """What was put under the key; None when that is gone."""
        path = self._path(key)
        try:
            raw = read_regular(path, _CACHED_BYTES + _DIGEST_SIZE)
            content = raw[_DIGEST_SIZE:]
            if hashlib.sha256(content).digest() != raw[:_DIGEST_SIZE]:
                return None
            os.utime(path)
        except OSError:
            return None
        return content

    def put(self, key: tuple[str, ...], content: bytes) -> None:
        """Keep the content, at the cost of the oldest."""
        if len(content) > min(_CACHED_BYTES, self.limit - _DIGEST_SIZE):
            return
        path = self._path(key)
        with suppress(OSError, OutputError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(content).digest() + content, mode=0o600, follows=False)
            with self._lock:
                self._make_room(len(content) + _DIGEST_SIZE)

    def _path(self, key: tuple[str, ...]) -> Path:
        name = hashlib.sha256("\0".join(key).encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / name[:2] / name[2:]

    def _make_room(self, added: int) -> None:
        """Count the folder the first time, and when it is full; other processes write to it too."""
        if self._filled is not None and self._filled + added <= self.limit:
            self._filled += added
            return
        files = sorted(_files(self.folder))
        self._filled = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._filled <= self.limit:
                break
            path.unlink(missing_ok=True)
            self._filled -= size


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Time, size and path of everything in the cache."""
    files = []
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        with suppress(OSError):
            status = path.stat()
            files.append((status.st_mtime_ns, status.st_size, path))
    return files
