"""How far a router input may drift before its experts change, and which expert takes over."""

from moegeom.studies.study import Study

STUDY = Study(
    name="perturb",
    package=__name__,
    place=3,
    question="How far may an input drift before its experts change, and which expert takes over?",
    example="moegeom research perturb CKPT --tokens REC",
    request="record:PerturbRequest",
    run="study:perturb",
    document="document:document",
    without_tokens="perturb needs recorded tokens: weights alone do not say where inputs are",
    without_inputs="how far an input may drift takes router inputs",
)
