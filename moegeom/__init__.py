"""Check, measure and compare the routers of Mixture-of-Experts checkpoints.

The names below load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> where it is defined; studies add theirs. A name must not be that of a subpackage.
_PUBLIC: dict[str, str] = {
    "open": "moegeom.api:open",
    "recording": "moegeom.api:recording",
    "scan": "moegeom.api:scan",
    "merge": "moegeom.api:merge",
    "report": "moegeom.api:report",
    "check": "moegeom.api:check",
    "route": "moegeom.api:route",
    "track": "moegeom.api:track",
    "routes": "moegeom.api:routes",
    "Recorder": "moegeom.recorder:RouterRecorder",
    "Checkpoint": "moegeom.studies.opened:Checkpoint",
    "Recording": "moegeom.studies.opened:Recording",
    "Report": "moegeom.document.report:Report",
    "GateReport": "moegeom.document.report:GateReport",
    "ScanReport": "moegeom.document.report:ScanReport",
    "RoutedTokens": "moegeom.engine.route:RoutedTokens",
    "Router": "moegeom.core.router:Router",
    "Finding": "moegeom.core.finding:Finding",
    "RemoteOptions": "moegeom.checkpoint.remote.url:RemoteOptions",
    "MoeGeomError": "moegeom.core.errors:MoeGeomError",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _PUBLIC:
        if name not in _studies():
            raise AttributeError(f"module 'moegeom' has no attribute {name!r}")
        return _studies()[name].function
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, *_studies(), "__version__"])


def _version() -> str:
    """Of the installed distribution; 0 in a checkout that is not installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return metadata.version("moegeom")
    except metadata.PackageNotFoundError:
        return "0"


def _studies() -> Any:
    return importlib.import_module("moegeom.studies.study").studies()
