"""What a command that opens a checkpoint and tokens is asked."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from moegeom.checkpoint.remote.url import RemoteOptions
from moegeom.core.errors import UsageError
from moegeom.core.option import argument, option
from moegeom.core.tokens import TILE, InputNoise, Stage, TokenColumns, TokenSource
from moegeom.engine.parameters import default_of, family_parameters, option_of, shared_fields
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily
from moegeom.tokens.files import TokenFiles
from moegeom.tokens.memory import HeldArrays

#: What is accepted wherever a checkpoint is asked for.
CHECKPOINT = (
    "folder (also DCP), index json, or .safetensors, .gguf, .bin, .pt, .pth or .ckpt file; or the "
    "URL of one: hf://OWNER/NAME@REVISION, https://, s3://"
)

#: Lines of help of options that not only ``ModelTerms`` has.
LAYERS = "Layers, such as 0,3-7."
FAIL_ON = "Least severity that fails: error, warning."
NO_CACHE = "Ask the server of a URL for everything; keep nothing."
FETCHED = "How what is behind a URL is fetched and kept."


class Watch(Protocol):
    """Listens to a running scan."""

    def start(self, num_tokens: int, unit: str = "") -> None: ...

    def begin(self, what: str) -> None: ...

    def advance(self, num_tokens: int) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Which tokens count, for every computation on tokens.

    Raises
    ------
    UsageError
        For another word than ``fail`` and ``skip``.
    """

    IS_SHARED: ClassVar[bool] = True
    PYTHON_ONLY: ClassVar[tuple[str, ...]] = ("backend",)

    exclude_first: int = option("Leave out the first N tokens of each document (sinks).", 0, min=0)
    non_finite: Literal["fail", "skip"] = option(
        "Tokens that are not finite: fail or skip.",
        "fail",
        outside_plan="a part that was finished without it has no token to skip",
    )
    seed: int = option("Seed of random routers, slices and samples.", 0, min=0)
    backend: str = option("`cpu`, or `reference` for the plain NumPy definitions.", "cpu")

    def __post_init__(self) -> None:
        if self.non_finite not in ("fail", "skip"):
            raise UsageError(f"--non-finite {self.non_finite}: expected fail or skip.")

    def counted(self, columns: TokenColumns) -> np.ndarray:
        """Of each token, whether it is none of the first of its document, or nobody says."""
        return (columns.position < 0) | (columns.position >= self.exclude_first)

    @property
    def skips_non_finite(self) -> bool:
        """Whether tokens that are not finite are left out."""
        return self.non_finite == "skip"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How many threads share the work."""

    IS_SHARED: ClassVar[bool] = True

    num_workers: int | None = option(
        "Worker threads [default: all].",
        min=1,
        in_python="Worker threads; None: one for each processor.",
        outside_plan="pace",
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(WorkerOptions, ComputeOptions):
    """How tokens are measured at a router.

    Under each of ``arithmetics`` the choice is compared with that of the router as stored, or with
    that under the arithmetic ``reference``. The ``what_ifs`` are other ways to choose on the same
    tokens. ``noise`` disturbs the inputs: of all routers, or of those that it names.
    """

    batch_tokens: int | None = option("Tokens that a worker holds at once.", outside_plan="pace")
    per_token: bool = option("Also write tokens/, one row per token.", False)
    arithmetics: tuple[str, ...] = option(
        "An arithmetic (repeatable; `moegeom list arithmetics`).", ()
    )
    reference: str | None = option("The arithmetic to compare with [default: as stored].")
    what_ifs: tuple[str, ...] = option(
        "NAME[:PARAMETER=VALUE,...] (repeatable).", (), metavar="SPEC"
    )
    what_if_batch: int = option("Tokens tried together, where other tokens matter.", TILE)
    noise: InputNoise | Mapping[str, InputNoise] | None = option("Noise on the inputs.")

    def noise_at(self, router: str) -> InputNoise | None:
        """The noise on the inputs of one router; None for none."""
        if self.noise is None or isinstance(self.noise, InputNoise):
            return self.noise
        return self.noise.get(router)


#: What is asked where nothing is.
DEFAULTS = MeasureOptions()


@dataclass(frozen=True, kw_only=True)
class TokenTerms(ComputeOptions):
    """What the files of the tokens are, and which of their tests are waived."""

    IS_SHARED: ClassVar[bool] = True

    stage: Stage | None = option(
        "What the numbers of a foreign file are: router_input, pre_norm, logits, top_logits or ids."
    )
    dialect: str | None = option("Whose trace it is, where the file does not show it.")
    expert_map: str | None = option(
        "Which expert lies at which place, for a trace that names places: FILE.json."
    )
    router_map: Mapping[str, str] = option(
        "KEY=ROUTER for a foreign array, or 'layer{i}=text/{i}' for all.",
        dict,
        in_python="Key of a foreign array -> router; `layer{i}` -> `text/{i}` for all.",
    )
    stale_inputs: bool = option(
        "Accept a recording of another checkpoint.",
        False,
        outside_plan="a label, written at the end for all routers",
    )
    unverified: bool = option(
        "Accept a recording that fails its tests.",
        False,
        outside_plan="a label, written at the end for all routers",
    )


@dataclass(frozen=True, kw_only=True)
class ModelTerms:
    """Which routers of a checkpoint, how to read them where its family is not known, and how to
    fetch it: ``remote`` None is as usual.
    """

    IS_SHARED: ClassVar[bool] = True

    layers: str | None = option(LAYERS, also="layer")
    requested_family: RequestedFamily = field(
        default=NOTHING_ASKED,
        metadata={"outside_plan": "what it makes of the checkpoint stands under rules and routers"},
    )
    remote: RemoteOptions | None = option(
        NO_CACHE, in_python=FETCHED, outside_plan="how bytes come, not which"
    )


@dataclass(frozen=True)
class RoutersRequest(ModelTerms):
    """Which checkpoint, and which of its routers."""

    checkpoint: str = argument(f"Checkpoint: {CHECKPOINT}.")


@dataclass(frozen=True, kw_only=True)
class Terms(ModelTerms, TokenTerms):
    """What every command that opens a checkpoint and tokens is asked in the same words."""

    IS_SHARED: ClassVar[bool] = True

    def typed_again(self) -> str:
        """The options that a command on the same checkpoint and tokens needs again, for a shell."""
        typed = {
            "stage": self.stage,
            "dialect": self.dialect,
            "expert_map": self.expert_map,
            **family_parameters(self.requested_family),
            "exclude_first": self.exclude_first,
            "non_finite": self.non_finite if self.skips_non_finite else None,
            "stale_inputs": self.stale_inputs,
            "unverified": self.unverified,
        }
        words: list[str] = []
        for name, value in typed.items():
            if value not in (None, False):
                words += [option_of(name)] if value is True else [option_of(name), str(value)]
        for key, router in self.router_map.items():
            words += [option_of("router_map"), f"{key}={router}"]
        return shlex.join(words)

    def shared_terms(self) -> dict[str, Any]:
        """What another request on the same terms is asked too, by name."""
        return {name: getattr(self, name) for name in shared_fields(type(self))}


@dataclass(frozen=True, kw_only=True)
class OutTerms:
    """What becomes of results that are there already."""

    IS_SHARED: ClassVar[bool] = True

    overwrite: bool = option(
        "Replace results that are there already.",
        False,
        outside_plan="what to do with older results",
    )


@dataclass(frozen=True, kw_only=True)
class RunTerms(WorkerOptions, Terms):
    """How a scan is run. ``device`` changes how fast the answer comes, not the answer: None is
    ``auto`` that says nothing where it stays on the processor. Unfinished results are gone on with
    unless ``restart``.

    Raises
    ------
    UsageError
        For a device of a kind that there is not.
    """

    IS_SHARED: ClassVar[bool] = True

    device: str | None = option(
        "auto, cpu, cuda, cuda:1 or cuda:0,1 [default: auto].",
        outside_plan="the kind that was chosen stands beside it",
    )
    restart: bool = option(
        "Discard unfinished results instead of going on.",
        False,
        outside_plan="what to do with an older plan",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device is not None:
            from moegeom.engine.devices.choice import refuse_unknown_device

            refuse_unknown_device(self.device)


@dataclass(frozen=True, kw_only=True)
class ShareTerms:
    """How a scan is shared out between machines.

    ``part``, such as 3/64, folds that share of the tokens alone, for
    :func:`moegeom.pipeline.merge`; ``engine`` ``ray`` or ``ray:ADDRESS`` has the workers of a
    cluster fold such parts.
    """

    IS_SHARED: ClassVar[bool] = True

    part: str | None = option(
        "One of n parts, for moegeom merge.",
        metavar="I/N",
        outside_plan="results are those of all parts",
    )
    engine: str | None = option(
        "ray, or ray:ADDRESS: workers of a cluster fold parts.",
        outside_plan="who does it, not what",
    )


@dataclass(frozen=True, kw_only=True)
class RunBTerms:
    """B, another run, and what its file is where it cannot say it itself."""

    IS_SHARED: ClassVar[bool] = True

    run_b: str | None = option("B, another run of the same text: recording, or trace.")
    stage_b: str | None = option("What the numbers of B are, where B is a foreign file.")
    dialect_b: str | None = option("Whose trace B is, where the file does not show it.")
    expert_map_b: str | None = option("The same as --expert-map, for a trace B.")
    map_b: Mapping[str, str] = option("The same as --map, for the arrays of B.", dict)


#: Names of what is said of B.
OF_RUN_B = tuple(of.name for of in dataclasses.fields(RunBTerms))


def refuse_late(request: Any, name: str, *still: str) -> None:
    """Raises UsageError where a request on results says how to measure; ``still`` may be said."""
    pace = ("num_workers", "device", "backend")
    for of in dataclasses.fields(request):
        value = getattr(request, of.name)
        if of.name not in (*still, *pace) and value != default_of(of):
            parts = family_parameters(value) if of.name == "requested_family" else {of.name: value}
            raise too_late(name, option_of(next(n for n, part in parts.items() if part)))


def too_late(name: str, flag: str, instead: str = "name a checkpoint") -> UsageError:
    """Of an option that says how to measure, beside results."""
    return UsageError(
        f"{name} holds results, which were measured before; {flag} comes too late.",
        f"Leave {flag} out, or {instead}.",
    )


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


#: The lines of help of ``out`` and ``tokens``.
OUT = "Results directory [default: runs/NAME, after checkpoint, tokens, options]."
TOKENS = (
    "Recording; traces of an engine, also 'dump/*.pt', a folder, or repeated; or npy, npz, "
    "safetensors, Parquet with --stage."
)


@dataclass(frozen=True)
class TokensRequest(Terms):
    """What a command is asked that looks at a checkpoint and, where there are any, at tokens."""

    checkpoint: str = argument(
        f"Checkpoint: {CHECKPOINT}.",
        outside_plan="a path; fingerprint, rules and routers stand for what it holds",
    )
    _: dataclasses.KW_ONLY
    tokens: Tokens | None = option(
        TOKENS, outside_plan="token_files and the facts of the source stand for what they are"
    )


@dataclass(frozen=True)
class StudyRequest(TokensRequest, OutTerms):
    """What a study of recorded tokens is asked that may write a file."""


@dataclass(frozen=True, kw_only=True)
class BudgetTerms:
    """How long a search may take.

    Raises
    ------
    UsageError
        For a time that is not positive.
    """

    IS_SHARED: ClassVar[bool] = True

    budget: float | None = option(
        "Stop a search of one router after so many seconds, with what it has by then.",
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        checked = getattr(super(), "__post_init__", None)
        if checked is not None:
            checked()
        if self.budget is not None and not self.budget > 0.0:
            raise UsageError(f"--budget {self.budget:g}: expected seconds above 0.")


@dataclass(frozen=True)
class ScanRequest(TokensRequest, ShareTerms, RunBTerms, OutTerms, RunTerms, MeasureOptions):
    """What was asked for. Without ``tokens``, weights only.

    ``run_b`` are choices of another run for the same tokens; ``checkpoint_b`` is a second
    checkpoint, whose routers choose for the same inputs. With ``experts`` those behind the routers
    are read, for what crossing a boundary does. ``out`` None is a folder of its own for each
    request in ``runs``; results of the same request that are there already are the answer.
    """

    #: What names of results end in where ``out`` is None.
    ENDING: ClassVar[str] = "moegeom"

    #: ``moegeom boundary-report`` and ``moegeom whatif`` have them.
    PYTHON_ONLY: ClassVar[tuple[str, ...]] = (
        *(*ComputeOptions.PYTHON_ONLY, "batch_tokens", "arithmetics", "reference", "noise"),
        *("what_ifs", "what_if_batch", "checkpoint_b", "experts", *OF_RUN_B),
    )

    out: Path | None = option(
        OUT,
        in_python="Where to keep the results; None keeps them in memory.",
        outside_plan="where results go",
    )
    _: dataclasses.KW_ONLY
    checkpoint_b: str | None = option(
        "A second checkpoint: its routers on the same inputs.",
        outside_plan="a path; what its routers are stands beside it",
    )
    experts: bool = option("Read the experts: how far a flip moves their output.", False)

    @property
    def compares(self) -> bool:
        """Whether some other choice is compared with that of the routers as stored."""
        others = (self.run_b, self.checkpoint_b)
        return bool(self.arithmetics or self.what_ifs) or any(o is not None for o in others)


@dataclass(frozen=True)
class MergeRequest(OutTerms):
    """Which parts are added up, and where what they are of lies here."""

    parts: tuple[Path, ...] = argument("All folders that scan ... --part i/n wrote, in any order.")
    _: dataclasses.KW_ONLY
    out: Path | None = option(OUT, in_python="Where to keep the results [default: runs/NAME].")
    checkpoint: str | None = option("Where the checkpoint is here, if it is elsewhere.")
    tokens: str | None = option("Where the tokens are here, if they are elsewhere.")
