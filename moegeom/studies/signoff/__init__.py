"""May an export stand for its original?"""

from moegeom.studies.study import Study

STUDY = Study(
    name="signoff",
    package=__name__,
    group="judge",
    place=2,
    question="Sign off an export B of A: exit code 0 passed, 1 failed, 4 inconclusive.",
    example="moegeom signoff A B --tokens REC_A --tokens REC_B",
    subject="pair",
    request="record:SignOffRequest",
    run="study:sign_off",
    has_figures=True,
    is_gate=True,
)
