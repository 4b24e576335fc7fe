"""What part of a layer's output is common to all tokens, or affine in its input."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64

Inputs = Float64[np.ndarray, "tokens hidden"]
Outputs = Float64[np.ndarray, "tokens width"]
Residual = Float64[np.ndarray, "tested width"]
Train = Bool[np.ndarray, "tokens"]

#: Fewer training tokens leave no component to fit.
LEAST_TRAIN = 20

#: Squares below this share of those of the outputs are the rounding of float64.
ROUNDING = 1e-26


def energy_share(part: Outputs, whole: Outputs) -> float:
    """Mean |part|^2 over mean |whole|^2; above 1 when parts cancel; nan for a whole of zeros.

    Source: docs/theory.md B11.
    """
    total = float((whole**2).sum())
    return float((part**2).sum()) / total if total > 0.0 else float("nan")


def mean_energy_share(values: Outputs) -> float:
    """|mean y|^2 / mean |y|^2: 1 for constant outputs, 1/T or so for independent ones; nan for 0.

    Source: docs/theory.md B11; S1 Remark 5.10.
    """
    total = float((values**2).sum(axis=1).mean()) if len(values) else 0.0
    mean = values.mean(axis=0) if len(values) else np.zeros(0)
    return float(mean @ mean) / total if total > 0.0 else float("nan")


def mean_direction_cosine(part: Outputs, whole: Outputs) -> float:
    """Cosine between the mean outputs; nan when one of them is 0. Source: docs/theory.md B11."""
    first, second = part.mean(axis=0), whole.mean(axis=0)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths > 0.0 else float("nan")


def affine_residual(inputs: Inputs, outputs: Outputs, train: Train) -> Residual:
    """What an affine map of the input leaves of the outputs, on tokens that it was not fitted on.

    Least squares on the leading principal components of the training inputs, fewer than a tenth as
    many as training tokens, so that the fit cannot follow noise. One row per token outside
    ``train``. Linear in the outputs: residuals of parts add up to that of their sum. For fewer than
    20 training tokens all nan. Source: docs/theory.md B11; oracle in tests: scikit-learn.
    """
    fitted, tested = inputs[train], inputs[~train]
    if len(fitted) < LEAST_TRAIN:
        return np.full((len(tested), outputs.shape[1]), np.nan)
    centre, mean = fitted.mean(axis=0), outputs[train].mean(axis=0)
    rank = min((len(fitted) - 1) // 10, inputs.shape[1])
    _, _, directions = np.linalg.svd(fitted - centre, full_matrices=False)
    basis = directions[:rank].T
    slope, *_ = np.linalg.lstsq((fitted - centre) @ basis, outputs[train] - mean, rcond=None)
    return outputs[~train] - mean - (tested - centre) @ basis @ slope


def affine_r2(inputs: Inputs, outputs: Outputs, train: Train) -> float:
    """R^2 of an affine map from input to output on tokens that it was not fitted on.

    1 - SSE / SST, SSE of :func:`affine_residual`, SST about the training mean. At most 1; negative
    for a map worse than the mean; nan for fewer than 20 training tokens or no test token, or when
    the test outputs are the training mean up to rounding. Source: docs/theory.md B11; oracle in
    tests: scikit-learn.
    """
    if train.sum() < LEAST_TRAIN:
        return float("nan")
    wrong = affine_residual(inputs, outputs, train)
    return _explained(wrong, outputs[~train] - outputs[train].mean(axis=0), outputs[~train])


def residual_r2(inputs: Inputs, part: Outputs, whole: Outputs, train: Train) -> float:
    """R^2 of a part as prediction of the whole, the affine fit taken out of both, on unseen tokens.

    1 - sum |r_whole - r_part|^2 / sum |r_whole|^2 with the residuals of :func:`affine_residual`.
    With the routed experts as part: 1 when all that is not affine in the input comes from them, 0
    when none of it does (the shared experts hold it); negative when parts cancel. nan for fewer
    than 20 training tokens, no test token, or a whole without residual.

    docs/theory.md B11 asks for R^2 of the routed output after removing the affine fit. Read so, it
    is a figure of its own; R^2 of the routed output as what is explained is 1 - :func:`affine_r2`.
    Oracle in tests: scikit-learn.
    """
    if train.sum() < LEAST_TRAIN:
        return float("nan")
    left = affine_residual(inputs, whole, train)
    wrong = affine_residual(inputs, whole - part, train)
    return _explained(wrong, left, whole[~train])


def _explained(wrong: Residual, spread: Residual, outputs: Residual) -> float:
    """1 - |wrong|^2 / |spread|^2; nan for a spread that is nothing but rounding of the outputs."""
    total = float((spread**2).sum())
    if not total > ROUNDING * float((outputs**2).sum()):
        return float("nan")
    return 1.0 - float((wrong**2).sum()) / total
