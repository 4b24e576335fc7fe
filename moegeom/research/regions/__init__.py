"""How many regions a router and the neurons of its experts make, on recorded tokens."""

from moegeom.studies.study import Study

STUDY = Study(
    name="regions",
    package=__name__,
    place=4,
    question="Between two tokens, how often do experts change, and how often their neurons?",
    example="moegeom research regions CKPT --tokens REC --layers 5",
    request="record:RegionsRequest",
    run="study:regions",
    document="document:document",
    without_tokens="regions are counted between recorded tokens",
)
