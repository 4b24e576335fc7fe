"""What a router of this size could do at most."""

from moegeom.studies.study import Study

STUDY = Study(
    name="capacity",
    package=__name__,
    place=2,
    question="What could a router of this size tell apart at most, and which published counts "
    "cannot be?",
    example="moegeom research capacity --from CKPT --data-dim 2,5,10",
    request="record:CapacityRequest",
    run="study:capacity",
    has_figures=True,
)
