"""Exact enumeration of routing cells: which sets of experts are cells, and where facets are."""

from moegeom.studies.study import Study

STUDY = Study(
    name="cells",
    package=__name__,
    place=1,
    question="List the routing cells and facets of a slice, prove or refute one set, or draw them.",
    example="moegeom research cells CKPT --layer 5 --tokens REC --plot figure.png",
    request="request:CellsRequest",
    run="study:cells",
    unit="vertices",
)
