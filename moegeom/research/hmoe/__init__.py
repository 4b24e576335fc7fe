"""What data can tell of the parameters of gated attention."""

from moegeom.studies.study import Study

STUDY = Study(
    name="hmoe",
    package=__name__,
    place=11,
    question="What can data tell of the parameters of gated attention, and what do descents show?",
    example="moegeom hmoe rates --quick",
    subject="options",
    request="record:HmoeRequest",
    run="study:hmoe",
    has_figures=True,
    unit="descents",
)
