"""The commented profile that ``moegeom check --init`` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from moegeom.checks.check import CHECKS, Check
from moegeom.checks.profile import FAMILY_WISE_ERROR

_HEAD = f"""\
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

_LIMITS = """\
# Limits of the checks, with their defaults. [[limits.CODE.at]] with layers = "0-2" sets others for
# some layers."""


def profile_template() -> str:
    """A profile that says nothing yet and shows everything that can be said."""
    limits = "\n".join(_limits_of(check) for check in sorted(CHECKS.all(), key=lambda c: c.code))
    return f"{_HEAD}\n{_LIMITS}\n{limits}"


def _limits_of(check: Check) -> str:
    return "".join(f"{line}\n" for line in _lines(check)) if check.limits else ""


def _lines(check: Check) -> Iterator[str]:
    yield f"# [limits.{check.code}]  # {check.title}"
    for limit in check.limits:
        yield from textwrap.wrap(
            f"{limit.text} ({limit.basis})", 96, initial_indent="#   ", subsequent_indent="#   "
        )
        yield f"# {limit.name} = {limit.default:g}"
