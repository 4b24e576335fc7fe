"""Which tokens are about to flip, and under what."""

from moegeom.studies.study import ResultsStudy

STUDY = ResultsStudy(
    name="boundary_report",
    package=__name__,
    group="measure",
    place=3,
    question="Which tokens are about to change experts.",
    example="moegeom boundary-report CKPT --tokens REC --arith bf16",
    request="record:BoundaryRequest",
    run="study:measure_boundary",
    record="record:boundary_report_of",
    has_figures=True,
)
