"""Projected rows of the other routers of A, to find which of them a router of B is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from moegeom.core.metric import NUM_PROJECTIONS
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float64
from moegeom.geometry.rows import projected
from moegeom.studies.changes.row_pair import OtherRows, effective_rows_of


class RoutersOfA:
    """All routers of A. Projections are made when a router is first far from its own."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = {router.name: router for router in routers}

    @cached_property
    def _projected(self) -> Mapping[str, Float64[np.ndarray, "experts count"]]:
        return {
            name: projected(effective_rows_of(router), NUM_PROJECTIONS)
            for name, router in self._routers.items()
            if np.isfinite(router.weight).all()
        }

    def beside(self, b: Router) -> OtherRows:
        """The other routers of A for one of B, their rows with their own gain and with B's."""

        def rows(name: str) -> Mapping[str, Float64[np.ndarray, "experts dimension"]]:
            other = self._routers[name]
            projections = {"": effective_rows_of(other)}
            if b.gain is not None and other.gain is not None:
                with_gain = other.weight.astype(np.float64) * b.gain.astype(np.float64)
                projections["behind its own gain, of "] = with_gain
            return projections

        return OtherRows(
            lambda: self._projected, lambda values: projected(values, NUM_PROJECTIONS), rows
        )

    def biases(self, kind: str, of: str) -> Mapping[str, Float[np.ndarray, "experts"]]:
        """The biases of one kind of all routers but one."""
        name = kind.replace(" ", "_")
        by_router = {n: getattr(router, name) for n, router in self._routers.items() if n != of}
        return {n: values for n, values in by_router.items() if values is not None}
