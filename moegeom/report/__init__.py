"""Results to something a person or a program reads; begins from the results directory alone."""

from moegeom.report._reporter import REPORTERS, Reporter, View

__all__ = ["REPORTERS", "Reporter", "View"]
