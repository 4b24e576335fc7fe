"""May an export stand for its original?"""

from moegeom.studies.study import Study

STUDY = Study(
    name="signoff",
    package=__name__,
    group="ship",
    place=2,
    question="Judge an export B of a checkpoint A.",
    example="moegeom signoff A B --tokens REC_A --tokens REC_B",
    subject="pair",
    request="record:SignOffRequest",
    run="study:sign_off",
    has_figures=True,
    is_gate=True,
)
