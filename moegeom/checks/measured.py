"""The rows of the results, sorted for the checks that look at them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.checks.baseline import Baseline, BaselineRouter
from moegeom.checks.profile import Threshold
from moegeom.core.errors import ResultsError
from moegeom.core.finding import Severity
from moegeom.core.row_keys import ALL, is_domain, is_stored_whole
from moegeom.core.shapes import Bool, Float, Float64, Int64
from moegeom.core.text import listed, listing, number_of
from moegeom.results.reader import ResultsView
from moegeom.results.run_file import is_verified_here, num_non_finite

Row = Mapping[str, Any]

#: Stands where nobody typed a path of the checkpoint: results in memory were judged.
NO_CHECKPOINT = "CKPT"

#: Stands where nobody typed a path of tokens: results were measured before.
NO_NAME = "TOKENS"


class MissingColumnError(ResultsError):
    """A column that a check reads is not in the results: an older moegeom wrote them."""


class _Columns(dict):
    """A row; asking for a column that the results never had is an error of its own."""

    def __missing__(self, name: str) -> Any:
        raise MissingColumnError(f"the results hold no column '{name}' (an older moegeom?)")


def spread_of(bias: Float[np.ndarray, "experts"]) -> float:
    """Standard deviation of biases; inf where their squares leave the range of numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        spread = float(bias.std())
    return spread if np.isfinite(spread) else np.inf


@dataclass(frozen=True)
class SinceBaseline:
    """One thing that happened since the baseline; ``subject`` is ``rows`` or a kind of bias.

    ``text`` says what, ``meaning`` what follows; ``severity`` is None where it is no fault by
    itself, or another check judges it.
    """

    word: str
    text: str
    meaning: str
    subject: str
    severity: Severity | None


@dataclass(frozen=True, eq=False)
class Drift:
    """One router beside its baseline.

    ``place[i]`` is the row of the baseline that row i is compared with: i, unless rows changed
    places. ``moved[i]`` is by how much, over its length, beside what ``changes`` say and what
    changes no choice; from 32 projections, which are right where the row was scaled, turned round
    or zeroed, else true to 12 % (one standard error). ``size`` is that of all rows together, as
    ``diff`` tells it.
    """

    place: Int64[np.ndarray, "experts"]
    moved: Float64[np.ndarray, "experts"]
    size: float
    changes: tuple[SinceBaseline, ...] = ()

    @property
    def renumbered(self) -> Bool[np.ndarray, "experts"]:
        """Rows that are found in another place of the baseline."""
        return self.place != np.arange(len(self.place))

    def faults(self, subject: str) -> tuple[SinceBaseline, ...]:
        """What was done to the rows, or to a bias, that is a fault by itself."""
        return tuple(c for c in self.changes if c.severity is not None and c.subject == subject)

    def is_trained(self) -> bool:
        """Whether the rows changed as training changes them: without a pattern."""
        return {c.word for c in self.changes if c.subject == "rows"} <= {"trained on"}


@dataclass(frozen=True)
class Measured:
    """Everything that a check may look at.

    ``layers`` has one row per router (as stored, population all), ``random`` the rows of the random
    router by router name, ``experts`` and ``domains`` the rows of a router by its name. ``run`` is
    ``run.json``. ``checkpoint``, ``tokens`` and ``options`` are what was typed, for the commands
    that findings suggest; ``thresholds`` are those of the profile.
    ``drifts`` say by router what happened since the baseline.
    """

    layers: Sequence[Row]
    random: Mapping[str, Row]
    experts: Mapping[str, Sequence[Row]]
    domains: Mapping[str, Sequence[Row]]
    checkpoint: str = NO_CHECKPOINT
    tokens: str = NO_NAME
    options: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    baseline: Baseline | None = None
    thresholds: Sequence[Threshold] = ()
    drifts: Mapping[str, Drift] = field(default_factory=dict)

    @property
    def has_tokens(self) -> bool:
        """True when anything was measured on tokens."""
        return any(row.get("num_tokens") for row in self.layers)

    def before(self, router: str) -> BaselineRouter | None:
        """What the baseline knows of a router; None without a baseline or such a router."""
        return None if self.baseline is None else self.baseline.routers.get(router)

    def facts(self, router: str) -> Mapping[str, Any]:
        """Shape, rule and storage of a router, from ``run.json``; empty when unknown."""
        return self._facts.get(router, {})

    @cached_property
    def _facts(self) -> Mapping[str, Mapping[str, Any]]:
        return {facts["name"]: facts for facts in reversed(self.run.get("routers", ()))}

    def measure_again(self, router: str, extra: str = "", command: str = "scan") -> str:
        """A command for one layer on the same tokens; empty where they have no name."""
        if self.tokens == NO_NAME:
            return ""
        parts = (f"--tokens {self.tokens}", self.options, f"--layers {layer_of(router)}", extra)
        return " ".join([f"moegeom {command}", self.checkpoint, *filter(None, parts)])


def knows_config(run: Mapping[str, Any]) -> bool:
    """Whether the facts of a run hold what the config says, or why nothing could be read."""
    return "gating" in run or "refused" in run


#: Standard deviations above the mean of random rows from which a pull of the mean input is theirs.
PULL_SIGMAS = 3.0


@dataclass(frozen=True)
class MeanPull:
    """The pull of the mean input on what is compared, and that of rows in random directions."""

    here: float
    random: float
    deviation: float

    @staticmethod
    def of(row: Mapping[str, Any]) -> MeanPull | None:
        """From a row of ``layers``; None where it is not known."""
        with_bias = row.get("input_pull_with_bias")
        here = row.get("input_pull") if with_bias is None else with_bias
        random, deviation = row.get("input_pull_random"), row.get("input_pull_random_sd")
        if here is None or random is None or deviation is None:
            return None
        return MeanPull(here, random, deviation)

    def is_above(self, limit: float) -> bool:
        """Whether it is above a limit, and above what random directions have by chance."""
        return self.here > max(limit, self.random + PULL_SIGMAS * self.deviation)


def layer_of(router: str) -> str:
    """``31`` of ``text/31/second``."""
    return router.split("/")[1]


def place_of(router: str) -> str:
    """``layer 31`` for a router of the main stack, else its whole name."""
    stack, layer, *slot = router.split("/")
    return router if slot or stack != "text" else f"layer {layer}"


def measured_results(
    results: ResultsView,
    checkpoint: str = NO_CHECKPOINT,
    tokens: str = NO_NAME,
    baseline: Baseline | None = None,
    options: str = "",
    drifts: Mapping[str, Drift] | None = None,
) -> Measured:
    """The rows of ``layers`` and ``experts`` of results, on disk or in memory, sorted for checks.

    ``checkpoint`` is a path, ``tokens`` and ``options`` are what a shell is given.
    """
    # what is not a number says nothing, and every comparison with it would pass
    layers = [
        _Columns((k, None if v != v else v) for k, v in row.items())
        for row in results.rows("layers")
    ]
    experts = [_Columns(row) for row in results.rows("experts")]
    stored = [row for row in layers if row["variant"] == "as_stored"]
    by_expert: dict[str, list[Row]] = {}
    for row in experts:
        if is_stored_whole(row):
            by_expert.setdefault(row["router"], []).append(row)
    by_domain: dict[str, list[Row]] = {}
    for row in stored:
        if is_domain(row["population"]):
            by_domain.setdefault(row["router"], []).append(row)
    return Measured(
        layers=[row for row in stored if row["population"] == ALL],
        random={
            row["router"]: row
            for row in layers
            if row["variant"] == "random" and row["population"] == ALL
        },
        experts=by_expert,
        domains=by_domain,
        # as it can be typed: quoted for a shell, and never taken for an option
        checkpoint=shlex.quote(f"./{checkpoint}" if checkpoint.startswith("-") else checkpoint),
        tokens=tokens,
        options=options,
        run=results.run,
        baseline=baseline,
        drifts=drifts or {},
    )


def unseen(measured: Measured) -> Iterator[str]:
    """What was left out: routers, tokens that are not finite, and hashes of the baseline."""
    yield from unseen_routers(measured)
    yield from unseen_experts(measured)
    if not knows_config(measured.run):
        yield "the config (these results do not hold it)"
    loaders = measured.run.get("loaders") or {}
    if (code := loaders.get("code")) and not is_verified_here(measured.run):
        yield f"the rule in the checkpoint's own code ({listing(code)})"
    if left := loaders.get("left"):
        more = f" and {len(left) - 1:,} modules more" if len(left) > 1 else ""
        yield f"what the adapter changes in {left[0]}{more}"
    for other in loaders.get("others", ()):
        if other["reason"]:
            yield f"what {listing(other['loaders'])} load ({other['reason']})"
    if lost := num_non_finite(measured.run):
        total = (measured.run.get("tokens") or {}).get("num_tokens", lost)
        yield f"{lost:,} of {number_of(total, 'token')} (not finite)"
    silent = [row["router"] for row in measured.layers if not row.get("num_tokens")]
    if measured.has_tokens and silent:
        which = listed([place_of(router) for router in silent], 3)
        of = f"{len(silent)} of {len(measured.layers)} routers choose"
        yield f"how {of} (no tokens of theirs: {which})"
    if any((b := measured.before(r)) and "rule" not in b.facts for r in measured.experts):
        yield "how weights are normalised and scaled (the baseline does not say)"
    if any((b := measured.before(r)) and b.modules is None for r in measured.experts):
        yield "whether blocks are the baseline's (it holds no inventory: --update-baseline)"
    hashed = [r for r in measured.experts if (b := measured.before(r)) and b.samples]
    left = [r for r in hashed if any(e.get("expert_sample") is None for e in measured.experts[r])]
    if left:
        of = f" in {len(left)} of {len(hashed)} routers" if len(left) < len(hashed) else ""
        yield f"experts (hashes in the baseline, not compared{of})"


def unseen_experts(measured: Measured) -> Iterator[str]:
    """Routers whose experts are stored in ways that are not judged, or not in all respects."""
    facts, lines = measured.run.get("expert_values", {}), dict[tuple[str, str], list[str]]()
    reasons: dict[str, str] = {}
    for one in facts.get("left_out", ()):
        if one["is_kind"]:
            reason = one["reason"].removeprefix(f"experts of {one['router']}: ")
            reason = reason.replace(f"router {one['router']}", "the router")
            # names of tensors differ in the number of the layer: the first one stands for all
            reason = reasons.setdefault(re.sub(r"\d+", "", reason), reason)
            lines.setdefault(("experts of", reason), []).append(one["router"])
    for one in facts.get("samples", ()):
        if one["not_compared"]:
            of = ("copies among experts of", one["not_compared"])
            lines.setdefault(of, []).append(one["router"])
        if not one["is_drawn_judged"]:
            of = ("whether training moved experts of", NO_FLOATS)
            lines.setdefault(of, []).append(one["router"])
    for (what, reason), routers in lines.items():
        more = f" and {len(routers) - 1} more" if len(routers) > 1 else ""
        yield f"{what} {routers[0]}{more} ({reason})"


#: Why experts are not held against an initialisation.
NO_FLOATS = "stored as no floats, or too few"


def unseen_routers(measured: Measured) -> Iterator[str]:
    """``2 of 60 routers``: found by name, and skipped, listed only, or not asked for.

    A router that is listed, and whose recorded choices were counted, is among the skipped tensors
    and among the measured routers: it counts once, as looked at.
    """
    if "refused" in measured.run:
        return
    checkpoint, routers = measured.run.get("checkpoint", {}), measured.run.get("routers", ())
    counted = {tensor for facts in routers for tensor in facts.get("tensors", ())}
    skipped = {entry["tensor"] for entry in checkpoint.get("skipped", ())} - counted
    num_measured = len(routers)
    num_named = checkpoint.get("num_routers", num_measured) + len(skipped)
    if num_named > num_measured:
        yield f"{num_named - num_measured} of {num_named} routers"
