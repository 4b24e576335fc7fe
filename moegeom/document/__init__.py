"""Results to something a person or a program reads; begins from the results directory alone."""

from moegeom.document._reporter import REPORTERS, Reporter, View
from moegeom.document._verdict_reporter import VERDICT_REPORTERS, VerdictReporter

__all__ = [
    "REPORTERS",
    "SERIES_EXPORTS",
    "SERIES_REPORTERS",
    "VERDICT_REPORTERS",
    "Reporter",
    "VerdictReporter",
    "View",
]
