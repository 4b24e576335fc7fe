"""What a command that opens a checkpoint and tokens is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.checkpoint.remote_options import RemoteOptions
from moegeom.core.input_noise import InputNoise
from moegeom.core.tokens import Stage, TokenSource
from moegeom.router.asked_family import NOTHING_ASKED, AskedFamily


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What every command that opens a checkpoint and tokens is asked in the same words.

    ``rules`` is the folder in which verified rules are remembered; None remembers nothing.
    ``remote`` says how a checkpoint behind a URL is fetched; None as usual.
    """

    layers: str | None = None
    stale_inputs: bool = False
    unverified: bool = False
    seed: int = 0
    asked: AskedFamily = NOTHING_ASKED
    rules: Path | None = None
    remote: RemoteOptions | None = None

    def shared(self) -> dict[str, Any]:
        """These fields by name, for another request on the same terms."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Terms)}


@dataclass(frozen=True)
class ScanRequest(Terms):
    """What was asked for. ``tokens`` and ``prior`` exclude each other; with neither, weights only.

    ``num_workers``, ``batch_tokens``, ``backend`` and ``device`` change how fast the answer comes,
    not the answer. ``device`` is ``cpu``, ``auto``, ``cuda`` or ``cuda:0,1``; None is ``auto``
    that says nothing where it stays on the processor. ``source`` is a token source made by the
    caller instead of a path. Under each of ``arithmetics`` the choice is compared with that of the
    router as stored, or with that under the arithmetic ``reference``. ``noise`` disturbs the
    inputs: of all routers, or of those that it names. ``other`` are choices of another run for the
    same tokens, ``against`` is a second checkpoint, whose routers choose for the same inputs.
    """

    checkpoint: str
    out: Path
    tokens: str | None = None
    source: TokenSource | None = None
    stage: Stage | None = None
    dialect: str | None = None
    router_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prior: str | None = None
    per_token: bool = False
    skip_non_finite: bool = False
    exclude_first: int = 0
    restart: bool = False
    backend: str = "cpu"
    device: str | None = "cpu"
    num_workers: int | None = None
    batch_tokens: int | None = None
    arithmetics: tuple[str, ...] = ()
    reference: str | None = None
    other: str | None = None
    other_dialect: str | None = None
    against: str | None = None
    noise: InputNoise | Mapping[str, InputNoise] | None = None

    @property
    def compares(self) -> bool:
        """Whether some other choice is compared with that of the routers as stored."""
        return bool(self.arithmetics) or self.other is not None or self.against is not None

    def noise_at(self, router: str) -> InputNoise | None:
        """The noise on the inputs of one router; None for none."""
        if self.noise is None or isinstance(self.noise, InputNoise):
            return self.noise
        return self.noise.get(router)


@dataclass(frozen=True)
class TokensRequest(Terms):
    """What a command is asked that looks at recorded tokens and leaves no results directory.

    ``source`` is a token source made by the caller instead of a path.
    """

    checkpoint: str
    tokens: str | None = None
    source: TokenSource | None = None
    stage: Stage | None = None
    router_map: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def as_scan(self) -> ScanRequest:
        """The scan of the same tokens, for what opens and examines them."""
        return ScanRequest(
            checkpoint=self.checkpoint,
            out=Path(),
            tokens=self.tokens,
            source=self.source,
            stage=self.stage,
            router_map=self.router_map,
            **self.shared(),
        )
