"""HTTP: byte ranges of files, and what each status means."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.checkpoint.remote.transport import Absent, Stamp, TryAgain
from moegeom.checkpoint.remote.url import shown
from moegeom.core.errors import CheckpointError
from moegeom.core.limits import REMOTE_BYTES_PER_S, REMOTE_REDIRECTS

if TYPE_CHECKING:
    import httpx2

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_UNSATISFIED = re.compile(r"bytes \*/(\d{1,19})")

#: Statuses that may pass.
PASSING = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Refusals:
    """Hints for statuses that will not pass."""

    denied: str = "Check user, password or signature in the URL; a signed link may have expired."
    missing: str = "Check the address, and that the upload is complete."


class HttpTransport:
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
                max_connections=options.num_parallel,
                max_keepalive_connections=options.num_parallel,
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
                f"{self._where(name)} cannot be followed ({type(error).__name__}).",
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
            f"{self._where(name)} redirects more than {REMOTE_REDIRECTS} times.",
            "Check the address.",
        )

    def _where(self, name: str) -> str:
        return f"{name}: {self.shown(name)}"

    def _check(
        self, response: httpx2.Response, name: str, offset: int, size: int, is_probe: bool
    ) -> tuple[Stamp, int]:
        """Version of the file and bytes of the body; an error unless the body is what was asked."""
        status = response.status_code
        etag = response.headers.get("ETag", "")
        modified = response.headers.get("Last-Modified", "")
        extent = response.headers.get("Content-Range", "")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise CheckpointError(f"{self._where(name)} is sent compressed, which was not asked.")
        if status == HTTPStatus.PARTIAL_CONTENT:
            first, last, total = _numbers(_CONTENT_RANGE, extent, 3) or (-1, -1, -1)
            if first != offset or last != min(offset + size, total) - 1:
                raise CheckpointError(
                    f"{self._where(name)} answers with the range {extent[:80]!r}, expected bytes "
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
            f"{self._where(name)} answers with the whole file where a part was asked for.",
            "Download the checkpoint: this server cannot send parts of files.",
        )

    def _refusal(self, response: httpx2.Response, name: str) -> Exception:
        answer = f"answers {response.status_code}{_phrase(response.status_code)}"
        if response.status_code in PASSING:
            return TryAgain(answer, retry_after(response.headers.get("Retry-After", "")))
        message = f"{self._where(name)} {answer}."
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
