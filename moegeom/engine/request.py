"""What a command that opens a checkpoint and tokens is asked."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.core.input_noise import InputNoise
from moegeom.core.tokens import Stage, TokenSource
from moegeom.router.asked_family import NOTHING_ASKED, AskedFamily

#: Fields of a request that stand in no plan, each with the reason. Every other one does: what
#: changes results cannot be forgotten when a field is added.
NOT_IN_PLAN: Mapping[str, str] = {
    "checkpoint": "a path; fingerprint, rules and routers stand for what it holds",
    "asked": "what it makes of the checkpoint stands under rules and routers",
    "remote": "how bytes come, not which",
    "out": "where results go",
    "tokens": "a path; token_files and the facts of the source stand for what it holds",
    "source": "its facts stand under tokens",
    "stale_inputs": "a label, written at the end for all routers",
    "unverified": "a label, written at the end for all routers",
    "skip_non_finite": "a part that was finished without it has no token to skip",
    "restart": "what to do with an older plan",
    "overwrite": "what to do with older results",
    "device": "the kind that was chosen stands beside it",
    "num_workers": "pace",
    "batch_tokens": "pace",
    "against": "a path; what its routers are stands beside it",
}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What every command that opens a checkpoint and tokens is asked in the same words.

    ``stage`` says what the numbers of a foreign file are, ``dialect`` whose trace it is and
    ``router_map`` which of its arrays is which router. ``remote`` says how a checkpoint behind a
    URL is fetched; None as usual. ``num_workers`` and ``device`` change how fast the answer comes,
    not the answer: ``device`` is ``cpu``, ``auto``, ``cuda`` or ``cuda:0,1``; None is ``auto`` that
    says nothing where it stays on the processor. Unfinished results are gone on with unless
    ``restart``; finished ones of another request are replaced only with ``overwrite``.
    """

    layers: str | None = None
    stage: Stage | None = None
    dialect: str | None = None
    router_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stale_inputs: bool = False
    unverified: bool = False
    seed: int = 0
    asked: AskedFamily = NOTHING_ASKED
    remote: RemoteOptions | None = None
    num_workers: int | None = None
    device: str | None = "cpu"
    restart: bool = False
    overwrite: bool = False

    def typed_again(self) -> str:
        """The options that a command on the same checkpoint and tokens needs again, for a shell."""
        named = {
            "--stage": self.stage,
            "--dialect": self.dialect,
            "--family": self.asked.file,
            "--router-pattern": self.asked.pattern,
            "--top-k": self.asked.top_k,
            "--score": self.asked.score,
            "--selection-bias": self.asked.selection_bias,
            "--logit-bias": self.asked.logit_bias,
        }
        flags = {
            "--renormalise": self.asked.renormalise,
            "--stale-inputs": self.stale_inputs,
            "--unverified": self.unverified,
        }
        pairs = [(name, str(value)) for name, value in named.items() if value is not None]
        pairs += [("--map", f"{key}={router}") for key, router in self.router_map.items()]
        given = [name for name, is_given in flags.items() if is_given]
        return shlex.join([*(word for pair in pairs for word in pair), *given])

    def shared(self) -> dict[str, Any]:
        """These fields by name, for another request on the same terms."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Terms)}


@dataclass(frozen=True)
class TokensRequest(Terms):
    """What a command is asked that looks at a checkpoint and, where there are any, at tokens.

    ``source`` is a token source made by the caller instead of a path. ``backend`` changes how fast
    the answer comes, not the answer.
    """

    checkpoint: str
    tokens: str | None = dataclasses.field(default=None, kw_only=True)
    source: TokenSource | None = dataclasses.field(default=None, kw_only=True)
    backend: str = dataclasses.field(default="cpu", kw_only=True)


@dataclass(frozen=True)
class ScanRequest(TokensRequest):
    """What was asked for. ``tokens`` and ``prior`` exclude each other; with neither, weights only.

    ``batch_tokens`` changes how fast the answer comes, not the answer. Under each of
    ``arithmetics`` the choice is compared with that of the router as stored, or with that under the
    arithmetic ``reference``.
    ``noise`` disturbs the inputs: of all routers, or of those that it names. ``other`` are choices
    of another run for the same tokens, ``against`` is a second checkpoint, whose routers choose for
    the same inputs. ``out`` None is a folder of its own for each request in ``runs``; results of
    the same request that are there already are the answer.
    """

    #: What names of results end in where ``out`` is None.
    ENDING: ClassVar[str] = "moegeom"

    out: Path | None = None
    prior: str | None = None
    per_token: bool = False
    skip_non_finite: bool = False
    exclude_first: int = 0
    batch_tokens: int | None = None
    arithmetics: tuple[str, ...] = ()
    reference: str | None = None
    other: str | None = None
    other_stage: str | None = None
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
