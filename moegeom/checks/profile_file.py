"""Profiles in files: ``moegeom.toml`` or ``[tool.moegeom]``, where what is not known is an error.

And the commented profile that ``moegeom check --init`` writes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from moegeom.checks.check import CHECKS, Check
from moegeom.checks.profile import (
    BUILT_IN,
    FAMILY_WISE_ERROR,
    BuiltIn,
    Ignore,
    LayerLimits,
    LimitSettings,
    Profile,
    Threshold,
)
from moegeom.core.documents import DocumentError, parse_toml
from moegeom.core.errors import UsageError
from moegeom.core.files import open_regular
from moegeom.core.finding import Severity
from moegeom.core.limits import MOST_TOML
from moegeom.core.registry import nearest_name
from moegeom.core.router import parse_layers

#: Names under which a profile is found in a folder, in this order.
PROFILE_NAME = "moegeom.toml"
_PROJECT_NAME = "pyproject.toml"

#: What a project's file with a profile holds somewhere.
_OWN_NAME = "moegeom"

_SEVERITIES = get_args(Severity)

_THRESHOLD_KEYS = (
    "column",
    "at_most",
    "at_least",
    "layers",
    "percentile",
    "severity",
    "reason",
)


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
    _check_keys(table, _READERS, where)
    read = {key: _READERS[key](value, f"{where}: {key}") for key, value in table.items()}
    renamed = {"threshold": "thresholds", "extends": "base"}
    return Profile(**{renamed.get(key, key): value for key, value in read.items()})


def _table_of(path: Path) -> dict[str, Any]:
    text = _text_of(path)
    try:
        return parse_toml(text)
    except DocumentError as error:
        raise UsageError(f"{path}: {error}.", "A profile is a page of TOML.") from None


def _text_of(path: Path) -> str:
    try:
        with open_regular(path, follows=True) as file:
            return file.read(4 * MOST_TOML + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: the profile cannot be read.", "`moegeom check --init` writes one."
        ) from error


def _check_keys(table: Any, keys: Iterable[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {_short(table)}, expected a table.")
    for key in table:
        if key not in keys:
            raise UsageError(
                f"{where}: unknown key '{_plain(key)}'.{nearest_name(key, keys)}",
                f"Known: {', '.join(keys)}.",
            )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} is {_short(value)}, expected text.")
    return value


def _number(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where} is {_short(value)}, expected a finite number.")
    return number


def _share(value: Any, where: str) -> float:
    share = _number(value, where)
    if not 0.0 < share < 1.0:
        raise UsageError(f"{where} is {share:g}, expected a probability between 0 and 1.")
    return share


def _severity(value: Any, where: str) -> Severity:
    if value not in _SEVERITIES:
        raise UsageError(f"{where} is {_short(value)}, expected {', '.join(_SEVERITIES)}.")
    return value


def _base(value: Any, where: str) -> BuiltIn:
    if value not in BUILT_IN:
        raise UsageError(f"{where} is {_short(value)}, expected {', '.join(BUILT_IN)}.")
    return value


def fail_on(value: Any, where: str) -> Severity:
    """``error`` or ``warning``: a gate that fails on notes would never pass."""
    if value not in _SEVERITIES[:2]:
        raise UsageError(f"{where} is {_short(value)}, expected {' or '.join(_SEVERITIES[:2])}.")
    return value


def known_code(value: Any, where: str) -> str:
    """A code, or the beginning of some; UsageError when no check has it."""
    code = _text(value, where)
    codes = sorted(check.code for check in CHECKS.all())
    if not any(full.startswith(code) for full in codes):
        raise UsageError(
            f"{where}: no check has the code '{_plain(code)}'.{nearest_name(code, codes)}",
            "`moegeom checks` lists them.",
        )
    return code


def _codes(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UsageError(f"{where} is {_short(value)}, expected a list of codes.")
    return tuple(known_code(code, where) for code in value)


def _selection(value: Any, where: str) -> tuple[str, ...]:
    codes = _codes(value, where)
    if not codes:
        raise UsageError(f"{where} is empty: nothing would be checked.")
    return codes


def _severities(table: Any, where: str) -> dict[str, Severity]:
    codes = [check.code for check in CHECKS.all()]
    _check_keys(table, codes, where)
    return {code: _severity(severity, f"{where}.{code}") for code, severity in table.items()}


def _ignores(value: Any, where: str) -> tuple[Ignore, ...]:
    return tuple(_ignore(entry, f"{where}[{i}]") for i, entry in enumerate(_tables(value, where)))


def _ignore(entry: Any, where: str) -> Ignore:
    _check_keys(entry, ("code", "layers", "reason"), where)
    if "reason" not in entry:
        raise UsageError(
            f"{where}: has no reason.", "Say why the finding is accepted: others will read it."
        )
    layers = entry.get("layers")
    return Ignore(
        code=known_code(entry.get("code"), f"{where}.code"),
        reason=_text(entry["reason"], f"{where}.reason"),
        layers=None if layers is None else _layers(layers, f"{where}.layers"),
    )


def _limits(value: Any, where: str) -> dict[str, LimitSettings]:
    checks = {check.code: check for check in CHECKS.all() if check.limits}
    _check_keys(value, checks, where)
    read = {}
    for code, table in value.items():
        names = [limit.name for limit in checks[code].limits]
        _check_keys(table, (*names, "at"), f"{where}.{code}")
        at = []
        for i, entry in enumerate(_tables(table.get("at", []), f"{where}.{code}.at")):
            here = f"{where}.{code}.at[{i}]"
            _check_keys(entry, ("layers", *names), here)
            layers = _layers(entry.get("layers"), f"{here}.layers")
            at.append(LayerLimits(layers, _numbers(entry, names, here)))
        read[code] = LimitSettings(_numbers(table, names, f"{where}.{code}"), tuple(at))
    return read


def _layers(value: Any, where: str) -> frozenset[int]:
    try:
        return parse_layers(_text(value, where))
    except UsageError as error:
        raise UsageError(
            error.message if where in error.message else f"{where}: {error.message}", error.hint
        ) from None


def _numbers(table: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, float]:
    return {name: _limit(table[name], f"{where}.{name}") for name in names if name in table}


def _limit(value: Any, where: str) -> float:
    """Every limit of a check is a size: a ratio, a share, a cosine, a number of sigmas."""
    number = _number(value, where)
    if number <= 0.0:
        raise UsageError(f"{where} is {number:g}, expected a number above 0.")
    return number


def _thresholds(value: Any, where: str) -> tuple[Threshold, ...]:
    entries = _tables(value, where)
    return tuple(_threshold(entry, f"{where}[{i}]") for i, entry in enumerate(entries))


def _threshold(entry: Any, where: str) -> Threshold:
    _check_keys(entry, _THRESHOLD_KEYS, where)
    sides = [side for side in ("at_most", "at_least") if side in entry]
    if len(sides) != 1:
        raise UsageError(f"{where}: expected either at_most or at_least.")
    bound = entry[sides[0]]
    is_relative = isinstance(bound, Mapping)
    if is_relative:
        _check_keys(bound, ("times_baseline",), f"{where}.{sides[0]}")
        bound = bound.get("times_baseline")
    percentile = entry.get("percentile")
    if percentile is not None:
        percentile = _number(percentile, f"{where}.percentile")
        if not 0.0 <= percentile <= 100.0:
            raise UsageError(f"{where}.percentile is {percentile:g}, expected 0 to 100.")
        if is_relative:
            raise UsageError(
                f"{where}: a percentile over layers has no layer of the baseline to compare with.",
                "Bound it absolutely, or leave percentile out.",
            )
    layers = entry.get("layers")
    return Threshold(
        column=_text(entry.get("column"), f"{where}.column"),
        side="at_most" if sides == ["at_most"] else "at_least",
        bound=_number(bound, f"{where}.{sides[0]}"),
        is_relative=is_relative,
        layers=None if layers is None else _layers(layers, f"{where}.layers"),
        percentile=percentile,
        severity=_severity(entry.get("severity", "error"), f"{where}.severity"),
        reason=_text(entry["reason"], f"{where}.reason") if "reason" in entry else "",
    )


def _tables(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where} is {_short(value)}, expected [[{where.rpartition(' ')[2]}]].")
    return value


def _short(value: Any) -> str:
    return _plain(repr(value))


def _plain(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


#: How the value of each key is read.
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "extends": _base,
    "select": _selection,
    "require": _codes,
    "fail_on": fail_on,
    "baseline": _text,
    "family_wise_error": _share,
    "severity": _severities,
    "ignore": _ignores,
    "limits": _limits,
    "threshold": _thresholds,
}


_TEMPLATE_HEAD = f"""\
# What `moegeom check` asks of checkpoints. Everything may be left out: commented keys show the
# defaults. `moegeom checks` lists the codes, `moegeom check --explain CODE` says what each
# looks for.

# The built-in profile that this one changes: "default", "release" (what broke others stops) or
# "training" (what is normal while training runs does not). `moegeom checks` shows what each weighs.
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

# A bound of your own on a column of `layers` (`moegeom metrics` lists them), at_most or at_least: a
# number, or {{ times_baseline = 1.2 }}; in each layer, or at a percentile over the layers.
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
    limits = "\n".join(_template_of(check) for check in sorted(CHECKS.all(), key=lambda c: c.code))
    return f"{_TEMPLATE_HEAD}\n{_TEMPLATE_LIMITS}\n{limits}"


def _template_of(check: Check) -> str:
    return "".join(f"{line}\n" for line in _limit_lines(check)) if check.limits else ""


def _limit_lines(check: Check) -> Iterator[str]:
    yield f"# [limits.{check.code}]  # {check.title}"
    for limit in check.limits:
        yield from textwrap.wrap(
            f"{limit.text} ({limit.basis})", 96, initial_indent="#   ", subsequent_indent="#   "
        )
        yield f"# {limit.name} = {limit.default:g}"
