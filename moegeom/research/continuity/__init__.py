"""``research continuity``: does the output of the experts jump at a boundary, and if smoothed?"""

from moegeom.studies.study import Study

STUDY = Study(
    name="continuity",
    package=__name__,
    place=6,
    question="Does the output of the experts jump at a boundary, and what does smoothing make "
    "of it?",
    example="moegeom research continuity CKPT --tokens REC --plot jump.pdf",
    request="record:ContinuityRequest",
    run="study:continuity",
    document="document:document",
    without_tokens="lines are drawn through recorded tokens",
    has_figures=True,
)
