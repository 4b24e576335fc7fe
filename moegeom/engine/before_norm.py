"""The angle from an input of a norm to the nearest direction with another choice."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float64, Int32

from moegeom.engine.prepared import PreparedRouter
from moegeom.geometry.rows.pre_norm import angle_bound, boundary_angle
from moegeom.kernels.reduction import Kernels


def angle_before_norm(
    prepared: PreparedRouter,
    values: Float[np.ndarray, "tokens hidden"],
    logits: Float[np.ndarray, "tokens experts"],
    chosen: Int32[np.ndarray, "tokens k"],
    kernels: Kernels,
) -> Float64[np.ndarray, "tokens"]:
    """Exact behind straight walls, a certified lower bound behind curved and grouped ones."""
    router = prepared.router
    assert router.gain is not None, "unavailable() asks for a norm"
    gain = router.gain.astype(np.float64)
    length = np.full(len(values), np.sqrt(router.hidden_size))
    if gain.all():  # else a coordinate is lost, and the norm of the input stands for all of them
        length = np.sqrt(((values / gain) ** 2).sum(axis=1))
    if not router.rule.is_affine:
        lower, _, _ = kernels["curved_distance"](logits, chosen, prepared.curved_before_norm)
        return angle_bound(lower, length)
    bias = np.zeros(router.num_experts) if router.affine_bias is None else router.affine_bias
    rows = router.weight.astype(np.float64) * gain
    return boundary_angle(logits, chosen, rows, bias.astype(np.float64), length)
