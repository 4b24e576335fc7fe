"""What experts give on recorded tokens, computed from the checkpoint."""

from moegeom.studies.study import Study

STUDY = Study(
    name="outputs",
    package=__name__,
    place=5,
    question="What do experts give on recorded tokens: how long, how constant, how alike?",
    example="moegeom research outputs CKPT --tokens REC --layers 5",
    request="record:OutputsRequest",
    run="study:outputs",
    document="document:document",
    without_tokens="experts are computed on recorded tokens",
    without_inputs="experts are computed on router inputs",
    endings=(),
    has_figures=True,
    unit="experts",
)
