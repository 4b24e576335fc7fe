"""What changed between two checkpoints."""

from moegeom.studies.study import Study

STUDY = Study(
    name="diff",
    package=__name__,
    group="compare",
    place=1,
    question="What happened to each router from A to B.",
    example="moegeom diff A B",
    subject="pair",
    takes_held=True,
    request="record:DifferenceRequest",
    run="study:difference",
    has_figures=True,
)
