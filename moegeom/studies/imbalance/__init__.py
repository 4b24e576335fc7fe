"""What makes the loads of routers uneven, and what evening them would cost."""

from moegeom.studies.study import Study

STUDY = Study(
    name="imbalance",
    package=__name__,
    group="why",
    place=1,
    question="Why loads are uneven, and what evening costs.",
    example="moegeom imbalance CKPT --tokens REC",
    request="record:ImbalanceRequest",
    run="study:imbalance",
    without_tokens="imbalance needs recorded tokens: weights alone do not say which experts they "
    "choose",
    endings=(".parquet", ".npz", ".safetensors"),
    has_figures=True,
)
