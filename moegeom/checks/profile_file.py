"""Profiles in files: ``moegeom.toml`` or ``[tool.moegeom]``, where what is not known is an error.

And the commented profile that ``moegeom check --init`` writes.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, defstruct
from msgspec.structs import asdict

from moegeom.checks.check import CHECKS, Check
from moegeom.checks.profile import (
    BUILT_IN,
    FAMILY_WISE_ERROR,
    BuiltIn,
    Ignore,
    LayerLimits,
    Profile,
    Threshold,
)
from moegeom.core.documents import parse_toml, record_of, refused_as
from moegeom.core.errors import UsageError
from moegeom.core.files import open_regular
from moegeom.core.finding import Severity
from moegeom.core.limits import MOST_TOML
from moegeom.core.registry import nearest_name
from moegeom.core.router import parse_layers
from moegeom.core.text import quoted

#: Names under which a profile is found in a folder, in this order.
PROFILE_NAME = "moegeom.toml"
_PROJECT_NAME = "pyproject.toml"

#: What a project's file with a profile holds somewhere.
_OWN_NAME = "moegeom"

Text = Annotated[str, Meta(min_length=1)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
#: Every limit of a check is one: a ratio, a share, a cosine, a number of sigmas.
Size = Annotated[float, Meta(gt=0.0, le=sys.float_info.max)]
FailOn = Literal["error", "warning"]

#: What is not written; no value of TOML.
_ABSENT: Any = None


class CheckCode(str):
    """The code of a check, or the beginning of some."""

    __slots__ = ()

    @classmethod
    def parsed(cls, value: object) -> CheckCode:
        """The code; ValueError when no check has it."""
        codes = sorted(check.code for check in CHECKS.all())
        if isinstance(value, str) and value and any(code.startswith(value) for code in codes):
            return cls(value)
        guess = nearest_name(str(value)[:60], codes).rstrip("?")
        raise ValueError(f"no check has the code {quoted(value, 60)}{guess and f'.{guess}'}")


class Layers(frozenset[int]):
    """Layers by their numbers."""

    __slots__ = ()

    @classmethod
    def parsed(cls, value: object) -> Layers:
        """The layers that a text names; ValueError where it names none."""
        if not isinstance(value, str):
            raise ValueError(f"{quoted(value, 60)} is no text such as '0,3-7'")
        try:
            return cls(parse_layers(value))
        except UsageError as error:
            raise ValueError(f"{error.message} {error.hint.rstrip('.')}") from None


class _Ignore(Struct, forbid_unknown_fields=True, frozen=True):
    code: CheckCode
    reason: str = ""
    layers: Layers = _ABSENT

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("has no reason: say why the finding is accepted, others will read it")


class _OfBaseline(Struct, forbid_unknown_fields=True, frozen=True):
    times_baseline: Number


class _Threshold(Struct, forbid_unknown_fields=True, frozen=True):
    column: Text
    at_most: Number | _OfBaseline = _ABSENT
    at_least: Number | _OfBaseline = _ABSENT
    layers: Layers = _ABSENT
    percentile: Annotated[float, Meta(ge=0.0, le=100.0)] = _ABSENT
    severity: Severity = "error"
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("expected either at_most or at_least")
        if self.percentile is not None and isinstance(self.at_most or self.at_least, _OfBaseline):
            raise ValueError(
                "a percentile over layers has no layer of the baseline to compare with: bound it "
                "absolutely, or leave percentile out"
            )

    def threshold(self) -> Threshold:
        """What is judged by it."""
        side = "at_least" if self.at_most is None else "at_most"
        facts = {key: value for key, value in asdict(self).items() if not key.startswith("at_")}
        bound = getattr(self, side)
        is_relative = isinstance(bound, _OfBaseline)
        number = bound.times_baseline if is_relative else bound
        return Threshold(side=side, bound=number, is_relative=is_relative, **facts)


class _File(Struct, forbid_unknown_fields=True, frozen=True):
    """A profile but for what has a key for each check."""

    extends: BuiltIn = "default"
    select: Annotated[tuple[CheckCode, ...], Meta(min_length=1)] = (CheckCode("MG"),)
    require: tuple[CheckCode, ...] = ()
    fail_on: FailOn = "error"
    baseline: Text = _ABSENT
    family_wise_error: Annotated[float, Meta(gt=0.0, lt=1.0)] = FAMILY_WISE_ERROR
    ignore: tuple[_Ignore, ...] = ()
    threshold: tuple[_Threshold, ...] = ()


@cache
def _whole_file() -> Any:
    """A profile, with the severity of each check and its limits."""
    checks = sorted(CHECKS.all(), key=lambda check: check.code)
    table = partial(defstruct, forbid_unknown_fields=True, frozen=True)
    limits = []
    for check in checks:
        sizes = [(limit.name, Size, _ABSENT) for limit in check.limits]
        at = table("At", [("layers", Layers), *sizes])
        whole = table("Limits", [*sizes, ("at", tuple[at, ...], ())])
        limits += [(check.code, whole, _ABSENT)] if sizes else []
    severities = [(check.code, Severity, _ABSENT) for check in checks]
    parts = {"severity": table("Severities", severities), "limits": table("Limits", limits)}
    return table("File", [(name, kind, kind()) for name, kind in parts.items()], bases=(_File,))


def _written(table: Struct) -> dict[str, Any]:
    """What a table says."""
    return {key: value for key, value in asdict(table).items() if value is not _ABSENT}


def find_profile(folder: Path) -> Path | None:
    """``moegeom.toml`` of a folder, or its ``pyproject.toml`` when that has ``[tool.moegeom]``."""
    if (folder / PROFILE_NAME).is_file():
        return folder / PROFILE_NAME
    project = folder / _PROJECT_NAME
    if project.is_file() and _own_table(project) is not None:
        return project
    return None


def read_profile(path: Path) -> Profile:
    """The profile in a TOML file.

    Raises
    ------
    UsageError
        When the file cannot be read, or holds a key or value that no profile has; the message names
        the key and the nearest known one.
    """
    if path.name != _PROJECT_NAME:
        return parse_profile(_table_of(path), path.name)
    table = _own_table(path)
    if table is None:
        raise UsageError(f"{path}: has no table [tool.moegeom].")
    return parse_profile(table, path.name)


def _own_table(project: Path) -> Any:
    """``[tool.moegeom]`` of a ``pyproject.toml``, whatever it is; None when there is none.

    A file without the name is not parsed: it is somebody else's, and may be of any size.
    """
    if _OWN_NAME not in _text_of(project):
        return None
    tool = _table_of(project).get("tool")
    return tool.get("moegeom") if isinstance(tool, Mapping) else None


def parse_profile(table: Mapping[str, Any], where: str) -> Profile:
    """The profile that a TOML table describes; ``where`` is named in errors."""
    hint = "`moegeom check --init` writes a profile that shows everything."
    with refused_as(UsageError, where, hint):
        file = record_of(_whole_file(), table)
    limits = {}
    for code, of_check in _written(file.limits).items():
        sizes = _written(of_check)
        at = [_written(entry) for entry in sizes.pop("at")]
        exceptions = (LayerLimits(entry, entry.pop("layers")) for entry in at)
        limits[code] = (LayerLimits(sizes), *exceptions)
    return Profile(
        base=file.extends,
        select=file.select,
        require=file.require,
        fail_on=file.fail_on,
        baseline=file.baseline,
        family_wise_error=file.family_wise_error,
        severity=_written(file.severity),
        ignore=tuple(Ignore(one.code, one.reason, one.layers) for one in file.ignore),
        limits=limits,
        thresholds=tuple(one.threshold() for one in file.threshold),
    )


def _table_of(path: Path) -> dict[str, Any]:
    text = _text_of(path)
    with refused_as(UsageError, str(path), "A profile is a page of TOML."):
        return parse_toml(text)


def _text_of(path: Path) -> str:
    try:
        with open_regular(path, follows=True) as file:
            return file.read(4 * MOST_TOML + 1).decode("utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: there is no such profile; built in are {', '.join(BUILT_IN)}.",
            "`moegeom check --init` writes a file to start from.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: the profile cannot be read.", "`moegeom check --init` writes one."
        ) from error


def fail_on(value: Any, where: str) -> FailOn:
    """``error`` or ``warning``: a gate that fails on notes would never pass."""
    if value not in get_args(FailOn):
        raise UsageError(
            f"{where} is {quoted(value, 60)}, expected {' or '.join(get_args(FailOn))}."
        )
    return value


def known_code(value: str, where: str) -> str:
    """A code, or the beginning of some; UsageError when no check has it."""
    try:
        return CheckCode.parsed(value)
    except ValueError as error:
        raise UsageError(f"{where}: {error}.", "`moegeom list checks` lists them.") from None


_TEMPLATE_HEAD = f"""\
# What `moegeom check` asks of checkpoints. Everything may be left out: commented keys show the
# defaults. `moegeom list checks` lists the codes, `moegeom check --explain CODE` says what each
# looks for.

# The built-in profile that this one changes: "default", "release" (what broke others stops) or
# "training" (what is normal while training runs does not). What each weighs: `moegeom list checks`.
# extends = "default"

# Codes, or beginnings of codes, that are judged.
# select = ["MG"]

# Checks that must not be left unjudged: without what they need the gate ends with exit code 4.
# require = []

# Least severity that fails the gate: "error" or "warning".
# fail_on = "error"

# The file to compare with, written by --update-baseline; committed beside this one.
# baseline = "moegeom-baseline.json"

# Probability that a healthy checkpoint fails any statistical check of a run by chance.
# family_wise_error = {FAMILY_WISE_ERROR:g}

# A finding that is known and accepted, with the reason; layers may be left out.
# [[ignore]]
# code = "MGN112"
# layers = "3-60"
# reason = "our engine keeps the bias in float32"

# A bound of your own on a column of `layers` (of `moegeom list metrics`), at_most or at_least:
# a number, or {{ times_baseline = 1.2 }}; in each layer, or at a percentile over the layers.
# [[threshold]]
# column = "load_cv_ddof0"
# at_most = 0.5
# percentile = 95
# severity = "error"
# reason = "above this our slowest device waits"

# Severity of a check: "error", "warning" or "note".
# [severity]
# MGB203 = "error"
"""

_TEMPLATE_LIMITS = """\
# Limits of the checks, with their defaults. [[limits.CODE.at]] with layers = "0-2" sets others for
# some layers."""


def profile_template() -> str:
    """A profile that says nothing yet and shows everything that can be said."""
    checks = sorted(CHECKS.all(), key=lambda check: check.code)
    limits = ["".join(f"{line}\n" for line in _limit_lines(check)) for check in checks]
    return "\n".join((_TEMPLATE_HEAD, _TEMPLATE_LIMITS, *limits))


def _limit_lines(check: Check) -> Iterator[str]:
    if check.limits:
        yield f"# [limits.{check.code}]  # {check.title}"
    for limit in check.limits:
        yield from textwrap.wrap(
            f"{limit.text} ({limit.basis})", 96, initial_indent="#   ", subsequent_indent="#   "
        )
        yield f"# {limit.name} = {limit.default:g}"
