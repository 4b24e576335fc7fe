"""Gates, sinks and heads of attention layers."""

from moegeom.studies.study import Study

STUDY = Study(
    name="attention",
    package=__name__,
    place=7,
    question="Gates and sinks of attention: where they are, what they do on tokens, dead heads.",
    example="moegeom research attention CKPT --layers 0-3",
    request="record:AttentionRequest",
    run="study:attention",
    has_figures=True,
    unit="layers",
)
