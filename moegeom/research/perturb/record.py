"""Router inputs that drift: when their experts change, and to which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegeom.core.option import option
from moegeom.core.tokens import InputNoise, SampleCounts
from moegeom.engine.request import BudgetTerms, StudyRequest


@dataclass(frozen=True)
class PerturbRequest(BudgetTerms, StudyRequest):
    """The options of ``perturb``, each with what it means."""

    _: dataclasses.KW_ONLY
    noise: str | InputNoise | Mapping[str, InputNoise] | None = option(
        "Noise on the inputs: share of their rms, or a second recording [default: 0.1]."
    )
    drift: bool = option("Drift by what all tokens of the second recording share.", False)
    time: float = option("The last time, in units of noise.", 4.0)
    at: tuple[int, ...] = option("Numbers of tokens, such as 3,17 [default: a sample of 64].", ())
    out: Path | None = option("Write curves and exits: FILE.parquet.")


@dataclass(frozen=True)
class ExitAt:
    """Probability that the experts have changed by a ``time``.

    ``lower`` and ``upper`` are proved, of linear rules, None of others; the simulated ones hold it
    between them on the mean over paths, kept within the proved, each with a standard error of at
    most ``simulated_se``, for curved and grouped rules with what their steps of time leave.
    """

    time: float
    lower: float | None
    upper: float | None
    simulated_lower: float
    simulated_upper: float
    simulated_se: float


@dataclass(frozen=True)
class HalfTime:
    """Time by which the experts have changed with probability 1/2; inf for later than was looked.

    ``earliest`` and ``latest`` are by the bounds, of linear rules, ``simulated`` between them, with
    a standard error: None where the time is 0 or later than was looked.
    """

    earliest: float | None
    simulated: float
    simulated_se: float | None
    latest: float | None


@dataclass(frozen=True)
class TokenPaths:
    """One token; ``nearest`` is the pair (expert out, expert in) of its nearest boundary."""

    token: int
    nearest: tuple[int, int]
    curve: tuple[ExitAt, ...]
    half: HalfTime


@dataclass(frozen=True)
class ExitPair:
    """How often expert ``expert_out`` leaves for ``expert_in`` when the set first changes.

    ``share_nearest`` is the share of tokens whose nearest boundary is that of the pair, ``apart``
    the standard error of the difference of both.
    """

    expert_out: int
    expert_in: int
    share: float
    share_se: float
    share_nearest: float
    apart: float


@dataclass(frozen=True)
class RouterPaths:
    """One router.

    ``curve`` and ``half`` are medians over the tokens; their errors are over tokens, of one token
    over its paths. ``is_linear`` where the distances of its rule are exact.
    ``size`` is the noise per unit of time in shares of the rms, None where it is not isotropic.
    ``elsewhere`` is the share of exits by which another expert comes in than the one behind the
    nearest boundary, ``at_corners`` that of exits where a second boundary is within a hundredth of
    the first distance; None with drift, as there are no ``exits`` then. ``unfinished`` is the share
    of walks that did not arrive, ``num_left`` how many tokens the budget left out.
    """

    router: str
    num_experts: int
    top_k: int
    is_linear: bool
    tokens: tuple[TokenPaths, ...]
    size: float | None
    curve: tuple[ExitAt, ...]
    half: HalfTime
    exits: tuple[ExitPair, ...]
    elsewhere: float | None
    elsewhere_se: float | None
    at_corners: float | None
    unfinished: float
    num_left: int = 0


@dataclass(frozen=True)
class Perturbed:
    """All routers; ``left_out`` have a reason. ``noise`` says in words what moves the inputs."""

    run: Mapping[str, Any]
    routers: tuple[RouterPaths, ...]
    left_out: tuple[tuple[str, str], ...]
    noise: str
    has_drift: bool
    time: float
    sample: SampleCounts
    seed: int
    written: str | None
