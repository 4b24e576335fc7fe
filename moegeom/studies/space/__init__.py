"""What the data let a router use: reference laws, the mean input, reachable expert sets."""

from moegeom.studies.study import Study

STUDY = Study(
    name="space",
    package=__name__,
    place=2,
    question="What makes the loads uneven: rows, mean input, covariance, or how tokens cluster?",
    example="moegeom space CKPT --tokens REC",
    request="record:SpaceRequest",
    run="study:space",
    document="document:document",
    without_tokens="space needs recorded tokens: weights alone do not say what their "
    "inputs have in common",
    endings=(".parquet", ".npz", ".safetensors"),
    has_figures=True,
)
