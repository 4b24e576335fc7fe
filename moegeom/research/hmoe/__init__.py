"""What data can tell of the parameters of gated attention."""

from moegeom.studies.study import Study

STUDY = Study(
    name="hmoe",
    package=__name__,
    place=8,
    question="What can data tell of the parameters of gated attention?",
    example="moegeom research hmoe",
    subject="options",
    request="record:HmoeRequest",
    run="study:hmoe",
)
