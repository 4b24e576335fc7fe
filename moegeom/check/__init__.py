"""Results to findings: one file per check."""

from moegeom.check._check import CHECKS, Check, measured_rows, run_checks

__all__ = ["CHECKS", "Check", "measured_rows", "run_checks"]
