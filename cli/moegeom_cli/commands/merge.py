"""``moegeom merge``: parts of a scan, folded on many machines, as one results directory."""

from __future__ import annotations

from moegeom.engine.request import MergeRequest
from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command


@command(Group.more, 1, "moegeom merge parts/* --out RESULTS")
def merge(request: MergeRequest, screen: ScreenOptions, plots: PlotOptions) -> int:
    """Add up the parts of a scan.

    Exit code 4 when some are missing.
    """
    from moegeom.core.finding import EXIT_INCONCLUSIVE
    from moegeom.document.results import results_document
    from moegeom.engine.parts import MissingParts
    from moegeom.pipeline import merge
    from moegeom.results.reader import open_results
    from moegeom.studies.parts import missing_document

    with screen.watching("tokens") as watch:
        merged = merge(request, watch)
    if isinstance(merged, MissingParts):
        screen.show(missing_document, merged)
        return EXIT_INCONCLUSIVE
    screen.show(results_document, open_results(merged), plots=plots)
    return 0
