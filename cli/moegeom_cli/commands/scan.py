"""``moegeom scan``: tokens through routers, into a results directory."""

from __future__ import annotations

from moegeom.engine.request import ScanRequest
from moegeom_cli.command import Group
from moegeom_cli.groups import PlotOptions, ScreenOptions, command


@command(Group.measure, 2, "moegeom scan CKPT --tokens REC")
def scan(request: ScanRequest, screen: ScreenOptions, plots: PlotOptions) -> int:
    """Measure every router on recorded tokens.

    Without tokens: what weights alone tell.
    """
    from moegeom.document.results import results_document
    from moegeom.pipeline import scan
    from moegeom.results.reader import open_results

    with screen.watching("tokens" if request.tokens else "routers") as watch:
        written = scan(request, watch)
    if request.part is not None:
        return screen.show_part(written)
    screen.show(results_document, open_results(written), plots=plots)
    return 0
