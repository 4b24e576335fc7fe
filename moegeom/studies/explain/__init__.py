"""Why two runs chose different experts."""

from moegeom.studies.study import Study

STUDY = Study(
    name="explain",
    package=__name__,
    group="compare",
    place=2,
    question="Why B chose other experts than A.",
    example="moegeom explain CKPT --tokens REC_A --run-b REC_B",
    request="record:ExplainRequest",
    run="study:explain",
    has_figures=True,
)
