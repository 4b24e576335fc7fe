"""What other routers would choose on the same tokens."""

from moegeom.studies.study import ResultsStudy

STUDY = ResultsStudy(
    name="whatif",
    package=__name__,
    group="why",
    place=2,
    question="Other ways to choose, on the same tokens.",
    example="moegeom whatif CKPT --tokens REC --router smooth:extra=0.5",
    request="record:WhatIfRequest",
    run="study:measure_what_ifs",
    record="record:what_if_report_of",
    has_figures=True,
)
