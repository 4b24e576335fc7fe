"""Results to something a person or a program reads; begins from the results directory alone."""

from moegeom.report._reporter import REPORTERS, Reporter, View
from moegeom.report._series_reporter import SERIES_EXPORTS, SERIES_REPORTERS
from moegeom.report._verdict_reporter import VERDICT_REPORTERS, VerdictReporter

__all__ = [
    "REPORTERS",
    "SERIES_EXPORTS",
    "SERIES_REPORTERS",
    "VERDICT_REPORTERS",
    "Reporter",
    "VerdictReporter",
    "View",
]
