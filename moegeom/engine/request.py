"""What a command that opens a checkpoint and tokens is asked."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from moegeom.checkpoint.remote.options import RemoteOptions
from moegeom.core.errors import UsageError
from moegeom.core.tokens import TILE, InputNoise, Stage, TokenSource
from moegeom.engine.parameters import family_parameters, option_of
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily
from moegeom.tokens.files import TokenFiles
from moegeom.tokens.memory import HeldArrays


def outside_plan(reason: str) -> dict[str, str]:
    """Metadata of a field that stands in no plan, for this reason.

    Every other field does: what changes results cannot be forgotten when a field is added.
    """
    return {"outside_plan": reason}


def option(text: str, default: Any = None, **bounds: float) -> Any:
    """A field of a request that the command line has as an option, with its line of help.

    ``min`` is the least value that may be typed.
    """
    return field(default=default, metadata={"help": text, **bounds})


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """What every computation on tokens is asked: which of them count, and how fast it goes.

    ``seed`` draws samples; the first ``exclude_first`` tokens of each document are left out, and so
    are tokens that are not finite where ``non_finite`` is ``skip``: ``fail`` stops at the first.
    ``num_workers`` and ``backend`` change how fast the answer comes, not the answer.

    Raises
    ------
    UsageError
        For another word than ``fail`` and ``skip``, and for a number of first tokens below 0.
    """

    seed: int = 0
    exclude_first: int = 0
    non_finite: Literal["fail", "skip"] = field(
        default="fail",
        metadata=outside_plan("a part that was finished without it has no token to skip"),
    )
    num_workers: int | None = field(default=None, metadata=outside_plan("pace"))
    backend: str = "cpu"

    def __post_init__(self) -> None:
        if self.non_finite not in ("fail", "skip"):
            raise UsageError(f"--non-finite {self.non_finite}: expected fail or skip.")
        if self.exclude_first < 0:
            raise UsageError(f"--exclude-first {self.exclude_first}: expected 0 or more.")

    @property
    def skips_non_finite(self) -> bool:
        """Whether tokens that are not finite are left out."""
        return self.non_finite == "skip"


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ComputeOptions):
    """How tokens are measured at a router.

    ``batch_tokens`` changes how fast the answer comes, not the answer. Under each of
    ``arithmetics`` the choice is compared with that of the router as stored, or with that under the
    arithmetic ``reference``. The ``what_ifs`` are other ways to choose on the same tokens; those to
    which other tokens matter are tried in batches of ``what_if_batch`` neighbours. ``noise``
    disturbs the inputs: of all routers, or of those that it names.
    """

    batch_tokens: int | None = field(default=None, metadata=outside_plan("pace"))
    per_token: bool = False
    arithmetics: tuple[str, ...] = ()
    reference: str | None = None
    what_ifs: tuple[str, ...] = ()
    what_if_batch: int = TILE
    noise: InputNoise | Mapping[str, InputNoise] | None = None

    def noise_at(self, router: str) -> InputNoise | None:
        """The noise on the inputs of one router; None for none."""
        if self.noise is None or isinstance(self.noise, InputNoise):
            return self.noise
        return self.noise.get(router)


#: What is asked where nothing is.
DEFAULTS = MeasureOptions()


@dataclass(frozen=True, kw_only=True)
class Terms(ComputeOptions):
    """What every command that opens a checkpoint and tokens is asked in the same words.

    ``stage`` says what the numbers of a foreign file are, ``dialect`` whose trace it is,
    ``expert_map`` is the file that says which expert lies at which place, for a trace that names
    places, and ``router_map`` says which of its arrays is which router. ``remote`` says how a
    checkpoint behind a URL is fetched; None as usual. ``device`` changes how fast the answer comes,
    not the answer: it is ``cpu``, ``auto``, ``cuda`` or ``cuda:0,1``; None is ``auto`` that says
    nothing where it stays on the processor. Unfinished results are gone on with unless
    ``restart``; finished ones of another request are replaced only with ``overwrite``.
    """

    layers: str | None = None
    stage: Stage | None = None
    dialect: str | None = None
    expert_map: str | None = None
    router_map: Mapping[str, str] = field(default_factory=dict)
    stale_inputs: bool = field(
        default=False, metadata=outside_plan("a label, written at the end for all routers")
    )
    unverified: bool = field(
        default=False, metadata=outside_plan("a label, written at the end for all routers")
    )
    asked: RequestedFamily = field(
        default=NOTHING_ASKED,
        metadata=outside_plan("what it makes of the checkpoint stands under rules and routers"),
    )
    remote: RemoteOptions | None = field(
        default=None, metadata=outside_plan("how bytes come, not which")
    )
    device: str | None = field(
        default=None, metadata=outside_plan("the kind that was chosen stands beside it")
    )
    restart: bool = field(default=False, metadata=outside_plan("what to do with an older plan"))
    overwrite: bool = field(default=False, metadata=outside_plan("what to do with older results"))

    def typed_again(self) -> str:
        """The options that a command on the same checkpoint and tokens needs again, for a shell."""
        said = {
            "stage": self.stage,
            "dialect": self.dialect,
            "expert_map": self.expert_map,
            **family_parameters(self.asked),
            "exclude_first": self.exclude_first,
            "non_finite": self.non_finite if self.skips_non_finite else None,
            "stale_inputs": self.stale_inputs,
            "unverified": self.unverified,
        }
        words: list[str] = []
        for name, value in said.items():
            if value not in (None, False):
                words += [option_of(name)] if value is True else [option_of(name), str(value)]
        for key, router in self.router_map.items():
            words += [option_of("router_map"), f"{key}={router}"]
        return shlex.join(words)

    def shared(self) -> dict[str, Any]:
        """These fields by name, for another request on the same terms."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Terms)}


#: Tokens of a request: a path or pattern, several of them, a source of the caller's, or arrays.
Tokens = str | TokenFiles | TokenSource | HeldArrays


def tokens_path(tokens: Tokens | None) -> str | None:
    """The path or pattern that they are, the first of several; None for tokens in memory."""
    if isinstance(tokens, TokenFiles):
        return tokens.paths[0]
    return tokens if isinstance(tokens, str) else None


def typed_tokens(tokens: Tokens | None) -> list[str]:
    """The options that name them, for a command; none for tokens in memory."""
    paths = tokens.paths if isinstance(tokens, TokenFiles) else (tokens,)
    return [word for path in paths if isinstance(path, str) for word in ("--tokens", path)]


def tokens_text(tokens: Tokens | None) -> str:
    """What stands behind ``--tokens`` in a command, for a shell; empty for tokens in memory."""
    return shlex.join(typed_tokens(tokens)).removeprefix("--tokens ")


@dataclass(frozen=True)
class TokensRequest(Terms):
    """What a command is asked that looks at a checkpoint and, where there are any, at tokens."""

    checkpoint: str = field(
        metadata=outside_plan("a path; fingerprint, rules and routers stand for what it holds")
    )
    _: dataclasses.KW_ONLY
    tokens: Tokens | None = field(
        default=None,
        metadata=outside_plan("token_files and the facts of the source stand for what they are"),
    )


@dataclass(frozen=True)
class ScanRequest(TokensRequest, MeasureOptions):
    """What was asked for. ``tokens`` and ``prior`` exclude each other; with neither, weights only.

    ``run_b`` are choices of another run for the same tokens, ``map_b`` says which of its arrays is
    which router; ``checkpoint_b`` is a second checkpoint, whose routers choose for the same inputs.
    With ``experts`` those behind the routers are read, for what crossing a boundary does.
    ``out`` None is a folder of its own for each request in ``runs``; results of the same request
    that are there already are the answer. ``part``, such as 3/64, folds that share of the tokens
    alone, for :func:`moegeom.pipeline.merge`; ``engine`` ``ray`` or ``ray:ADDRESS`` has the
    workers of a cluster fold such parts.
    """

    #: What names of results end in where ``out`` is None.
    ENDING: ClassVar[str] = "moegeom"

    out: Path | None = field(default=None, metadata=outside_plan("where results go"))
    _: dataclasses.KW_ONLY
    prior: str | None = None
    run_b: str | None = None
    stage_b: str | None = None
    dialect_b: str | None = None
    expert_map_b: str | None = None
    map_b: Mapping[str, str] = field(default_factory=dict)
    checkpoint_b: str | None = field(
        default=None, metadata=outside_plan("a path; what its routers are stands beside it")
    )
    experts: bool = False
    part: str | None = field(default=None, metadata=outside_plan("results are those of all parts"))
    engine: str | None = field(default=None, metadata=outside_plan("who does it, not what"))

    @property
    def compares(self) -> bool:
        """Whether some other choice is compared with that of the routers as stored."""
        others = (self.run_b, self.checkpoint_b)
        return bool(self.arithmetics or self.what_ifs) or any(o is not None for o in others)
