r"""The product of output and value matrix of attention heads: spectra, dead and equal heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from moegeom.core.shapes import Bool, Float, Float64
from moegeom.geometry.gram import RANK_TOLERANCE

#: Directions on which products are compared before pairs of them are.
_PROBES = 8

#: Pairs whose cosine on these directions is below are not looked at further.
_LEAST_PROBED = 0.9


def product_spectra(
    values: Float[np.ndarray, "values channels inputs"],
    outputs: Float[np.ndarray, "heads hidden channels"],
) -> Float64[np.ndarray, "heads channels"]:
    r"""Singular values of :math:`O_h V_{v(h)}` of each head, descending; v(h) = h V / H.

    The product of hidden x inputs numbers is never formed: with :math:`O = Q R` and
    :math:`V^\top = P S` it has the singular values of :math:`R S^\top`, which is channels x
    channels. Zeros stand behind them where hidden or inputs are fewer than channels. Error
    1e-13 of the largest. Oracle in tests: numpy.linalg.svd of the explicit product.
    """
    heads, _, channels = outputs.shape
    group = heads // len(values)
    right = [np.linalg.qr(one.T.astype(np.float64), mode="r") for one in values]
    spectra = np.zeros((heads, channels))
    for head in range(heads):
        left = np.linalg.qr(outputs[head].astype(np.float64), mode="r")
        core = left @ right[head // group].T
        spectrum = np.linalg.svd(core, compute_uv=False)
        spectra[head, : len(spectrum)] = spectrum
    return spectra


def spectrum_rank(spectrum: Float64[np.ndarray, "values"]) -> tuple[int, float]:
    r"""Rank and effective rank of a matrix with these singular values.

    Values s above 1e-7 of the largest count; effective rank :math:`\exp(-\sum p \ln p)` with
    :math:`p = s / \sum s` over these. 0 and 0.0 for zeros. Source: Roy and Vetterli 2007. Oracle in
    tests: numpy.linalg.matrix_rank, equal values.
    """
    nonzero = spectrum[spectrum > RANK_TOLERANCE * spectrum.max(initial=0.0)]
    if not len(nonzero):
        return 0, 0.0
    share = nonzero / nonzero.sum()
    return len(nonzero), float(np.exp(-(share * np.log(share)).sum()))


def dead_heads(
    norms: Float64[np.ndarray, "heads"], share: float = 0.01
) -> Bool[np.ndarray, "heads"]:
    r"""Heads whose product is shorter than a ``share`` of the median, or is zero.

    ``norms`` are Frobenius norms of the products. Where most are zero the median is, and all that
    are zero count. Oracle in tests: planted heads.
    """
    return (norms < share * np.median(norms)) | (norms == 0.0) if len(norms) else norms != norms


def alike_heads(
    values: Float[np.ndarray, "values channels inputs"],
    outputs: Float[np.ndarray, "heads hidden channels"],
    least: float = 0.99,
) -> list[tuple[int, int, float]]:
    r"""Pairs of heads whose products have a cosine of at least ``least``, and that cosine.

    :math:`\cos(A, B) = \langle A, B \rangle_F / (|A|_F |B|_F)`, unmoved by a factor and by mixing
    channels inside a head. From :math:`\langle O V, O' V' \rangle = \mathrm{tr}\,(O^\top O')
    (V' V^\top)`, for pairs that agree on 8 random directions (cosine .9 there, seed 0): one with
    the cosine .99 is missed where a ratio of lengths, F(8r, 8r) for rank r, is above 10:
    probability 2e-3 for r = 1, 1e-9 for r = 4. Zero products are like none. Oracle in tests:
    explicit products.
    """
    heads, _, _ = outputs.shape
    group = heads // len(values)
    probes = np.random.default_rng(0).standard_normal((values.shape[2], _PROBES))
    seen = np.stack([outputs[h] @ (values[h // group] @ probes) for h in range(heads)])
    flat = seen.reshape(heads, -1)
    length = np.linalg.norm(flat, axis=1)
    nonzero = np.flatnonzero(length > 0.0)
    flat = flat[nonzero] / length[nonzero, None]
    close = flat @ flat.T > _LEAST_PROBED
    pairs = [(nonzero[i], nonzero[j]) for i, j in _above(close)]
    alike = []
    for one, two in pairs:
        cosine = _product_cosine(
            (values[one // group], outputs[one]), (values[two // group], outputs[two])
        )
        if cosine >= least:
            alike.append((int(one), int(two), cosine))
    return alike


def _above(close: Bool[np.ndarray, "rows rows"]) -> Iterator[tuple[int, int]]:
    return (pair for pair in itertools.combinations(range(len(close)), 2) if close[pair])


def _product_cosine(
    one: tuple[np.ndarray, np.ndarray], two: tuple[np.ndarray, np.ndarray]
) -> float:
    one, two = ((v.astype(np.float64), o.astype(np.float64)) for v, o in (one, two))

    def inner(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
        return float(((a[1].T @ b[1]) * (a[0] @ b[0].T)).sum())

    return inner(one, two) / float(np.sqrt(inner(one, one)) * np.sqrt(inner(two, two)))
