"""What every way to a remote file offers, and what is done when it fails for a while."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.core.errors import CheckpointError

T = TypeVar("T")


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
