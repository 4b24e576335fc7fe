"""What a team asks of its checkpoints: which checks, with which limits, how severe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from moegeom.core.finding import SEVERITY_ORDER, Severity
from moegeom.core.router import format_layers

if TYPE_CHECKING:
    from moegeom.checks.check import Check

#: Probability that a healthy checkpoint fails any statistical check of a run by chance.
FAMILY_WISE_ERROR = 0.005

#: Profiles that are built in. ``default``: what moegeom judges by itself. ``release``: what broke
#: others stops. ``training``: what is normal while training runs does not. What each check weighs
#: in them stands on its own record.
BuiltIn = Literal["default", "release", "training"]

BUILT_IN: tuple[BuiltIn, ...] = get_args(BuiltIn)

_A = {"error": "an error", "warning": "a warning", "note": "a note"}

#: Codes of checks that are not judged, as many as are listed.
_MOST_CODES = 8


@dataclass(frozen=True)
class Ignore:
    """Findings that are known and accepted, with the reason; ``layers`` None means all."""

    code: str
    reason: str
    layers: frozenset[int] | None = None


@dataclass(frozen=True)
class LayerLimits:
    """Limits of one check; ``layers`` None means all."""

    values: Mapping[str, float]
    layers: frozenset[int] | None = None


@dataclass(frozen=True)
class Threshold:
    """A bound on a column of ``layers``, of the team's own.

    ``bound`` is an absolute value, or with ``is_relative`` a multiple of the baseline's value.
    ``percentile`` bounds that percentile over the layers instead of each layer.
    """

    column: str
    side: Literal["at_most", "at_least"]
    bound: float
    is_relative: bool = False
    layers: frozenset[int] | None = None
    percentile: float | None = None
    severity: Severity = "error"
    reason: str = ""


@dataclass(frozen=True)
class Profile:
    """Everything that ``moegeom.toml`` can say; the default is what moegeom judges by itself.

    ``base`` is the built-in profile that it extends. ``select`` and ``require`` hold codes or
    beginnings of codes; ``require`` turns "could not be judged" into "inconclusive". Of ``limits``
    of one check in one layer the last count.
    """

    base: BuiltIn = "default"
    select: tuple[str, ...] = ("MG",)
    require: tuple[str, ...] = ()
    fail_on: Severity = "error"
    baseline: str | None = None
    family_wise_error: float = FAMILY_WISE_ERROR
    severity: Mapping[str, Severity] = field(default_factory=dict)
    ignore: tuple[Ignore, ...] = ()
    limits: Mapping[str, Sequence[LayerLimits]] = field(default_factory=dict)
    thresholds: tuple[Threshold, ...] = ()

    def selects(self, code: str) -> bool:
        """True when the check with this code is to be judged."""
        return code.startswith(self.select)

    def judges(self, check: Check) -> bool:
        """True when the check is to be judged: selected, and one of the profile it extends."""
        return self.selects(check.code) and self.base in (check.only_in or BUILT_IN)

    def override(self, check: Check) -> Severity | None:
        """What all findings of a check weigh here; None where each weighs what it says."""
        own = self.severity.get(check.code)
        return check.severities.get(self.base) if own is None else own

    def requires(self, code: str) -> bool:
        """True when the gate must not pass without having judged this check."""
        return code.startswith(self.require)

    def names(self, code: str) -> bool:
        """True when this very check is asked for, and not a beginning of its code."""
        return code in (*self.select, *self.require)

    def ignores(self, code: str, layer: int | None) -> Ignore | None:
        """The entry that accepts findings of this check in this layer; layer None is the whole."""
        for entry in self.ignore:
            if code.startswith(entry.code) and (entry.layers is None or layer in entry.layers):
                return entry
        return None

    def limit(self, code: str, name: str, layer: int, default: float) -> float:
        """The limit of a check in a layer."""
        for entry in reversed(self.limits.get(code, ())):
            if (entry.layers is None or layer in entry.layers) and name in entry.values:
                return entry.values[name]
        return default


#: What moegeom judges by itself.
DEFAULT = Profile()


def deviations(profile: Profile, checks: Iterable[Check]) -> tuple[str, ...]:
    """What this profile judges otherwise than moegeom does by itself, in sentences.

    For the screen: who reads a verdict must see what was switched off, lowered or accepted.
    """
    checks = sorted(checks, key=lambda check: check.code)
    sentences = [] if profile.base == "default" else [_built_in(profile.base, checks)]
    off = [check.code for check in checks if not profile.selects(check.code)]
    sentences += [f"not judged: {_codes(off)}"] if off else []
    for check in checks:
        usual = check.severities.get(profile.base, check.severity)
        severity = profile.severity.get(check.code, usual)
        if severity != usual:
            sentences.append(f"{check.code} is {_A[severity]}, not {_A[usual]}")
        for at in profile.limits.get(check.code, ()):
            where = "" if at.layers is None else f" in layers {format_layers(at.layers)}"
            sentences += [
                f"{check.code} {limit.name} {at.values[limit.name]:g}{where}, not {limit.default:g}"
                for limit in check.limits
                if at.values.get(limit.name, limit.default) != limit.default
            ]
    for entry in profile.ignore:
        layers = "" if entry.layers is None else f" in layers {format_layers(entry.layers)}"
        sentences.append(f"{entry.code} is accepted{layers}: {entry.reason}")
    if profile.family_wise_error != FAMILY_WISE_ERROR:
        error = profile.family_wise_error
        sentences.append(f"probability of a false alarm {error:g}, not {FAMILY_WISE_ERROR:g}")
    return tuple(sentences)


def _built_in(base: BuiltIn, checks: Sequence[Check]) -> str:
    """By which built-in profile is judged, and which checks weigh less in it."""
    lower = [
        check.code
        for check in checks
        if SEVERITY_ORDER[check.severities.get(base, check.severity)]
        > SEVERITY_ORDER[check.severity]
    ]
    return f"built-in profile {base}{f' (less severe: {_codes(lower)})' if lower else ''}"


def _codes(codes: Sequence[str]) -> str:
    listed = ", ".join(codes[:_MOST_CODES])
    rest = len(codes) - _MOST_CODES
    return listed + (f" and {rest} more checks" if rest > 0 else "")
