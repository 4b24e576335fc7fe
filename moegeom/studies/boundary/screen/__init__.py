"""How exposed the choices are to other arithmetics: the record, and its reporters by file name."""

from moegeom.studies.boundary.screen._exposure import (
    EXPOSURE_REPORTERS,
    Exposure,
    VariantExposure,
    exposure_of,
)

__all__ = ["EXPOSURE_REPORTERS", "Exposure", "VariantExposure", "exposure_of"]
