"""``moegeom balance``: why loads are uneven, and which bias would even them."""

from moegeom.studies.study import Study

STUDY = Study(
    name="balance",
    package=__name__,
    place=3,
    question="Does a selection bias exist that balances these tokens, and does it hold on others?",
    example="moegeom balance CKPT --tokens REC",
    request="record:BalanceRequest",
    run="study:balance",
    document="document:document",
    without_tokens="balance needs recorded tokens: weights alone do not say which experts "
    "they choose",
    endings=(".npz", ".safetensors"),
    has_figures=True,
)
