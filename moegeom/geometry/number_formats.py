"""Number formats and weight schemes: rounding to them, the traces they leave, what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from moegeom.core.router import LogitMap
from moegeom.core.shapes import Bool, Float, Float32, Float64, Int64
from moegeom.geometry.rounding import gamma

# -------------------------------------------------------------------------------- codes of few bits
#: Formats of eight bits with an exponent, by name.
FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class Code:
    """How rows are coded.

    ``form`` is ``int8``, ``int4``, ``uint8``, ``uint4``, ``e4m3`` or ``e5m2``. One scale for
    ``rows`` x ``columns`` entries, 0 for all there are; it is the largest absolute value over
    ``largest`` (None: the range of an unsigned code, or no scale). ``is_stored`` where the result
    is kept in bfloat16.
    """

    form: str
    rows: int
    columns: int
    largest: float | None
    is_stored: bool = False


def largest_of(form: str) -> np.float32:
    """The largest number of a format of eight bits with an exponent."""
    return np.float32(ml_dtypes.finfo(FLOATS[form]).max)


def in_eight_bits(
    values: Float32[np.ndarray, "*shape"], form: str
) -> Float32[np.ndarray, "*shape"]:
    """``values`` rounded to nearest, ties to even, in a format of ``FLOATS``; beyond its range
    what the format has there.

    The first 16 bits of a float32 and whether any later one is set decide, as both formats end two
    bits or more before these. Oracle in tests: ml_dtypes.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    rounded, table = np.empty_like(flat), _rounded_halves(form)
    for start in range(0, len(flat), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE].view(np.uint32)
        half = (bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)
        np.take(table, half, out=rounded[start : start + _AT_ONCE], mode="clip")
    return rounded.reshape(values.shape)


@cache
def _rounded_halves(form: str) -> Float32[np.ndarray, "halves"]:
    """The rounded number of every float32 whose last 16 bits are 0, by its first ones."""
    halves = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return halves.astype(FLOATS[form]).astype(np.float32)


def decoded(
    weight: Float32[np.ndarray, "experts hidden"], code: Code
) -> Float32[np.ndarray, "experts hidden"]:
    r"""What is left of rows: :math:`s \cdot \mathrm{round}(w / s)` within the range of the code.

    Signed integers of b bits run from :math:`-2^{b-1}` to :math:`2^{b-1} - 1`, unsigned ones have a
    code for zero beside the scale. A group of zeros stays zero; a group cut by the border of the
    matrix has a scale of its own. Ties go to even. Methods that move errors between columns, such
    as GPTQ, are not functions of the weight alone.

    Source: compressed-tensors 0.20.0, calculate_qparams. Oracle in tests: the same, and torch.
    """
    experts, hidden = weight.shape
    height, width = code.rows or experts, code.columns or hidden
    padded = np.zeros((-(-experts // height) * height, -(-hidden // width) * width), np.float32)
    padded[:experts, :hidden] = weight
    # [groups down, height, groups across, width]
    groups = padded.reshape(len(padded) // height, height, -1, width)
    if code.form.startswith("u"):
        rounded = _unsigned(groups, 2 ** int(code.form[4:]) - 1)
    else:
        most = np.abs(groups).max(axis=(1, 3), keepdims=True)
        scale = np.ones_like(most) if code.largest is None else most / np.float32(code.largest)
        scale = np.where(scale > 0.0, scale, np.float32(1.0))
        if code.form in FLOATS:
            last = largest_of(code.form)  # beyond it e4m3 has nothing but nan
            rounded = in_eight_bits(np.clip(groups / scale, -last, last), code.form) * scale
        else:
            half = 2 ** (int(code.form[3:]) - 1)
            rounded = np.clip(np.rint(groups / scale), -half, half - 1) * scale
    whole = rounded.reshape(padded.shape)[:experts, :hidden]
    if code.is_stored:
        whole = whole.astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(whole, np.float32)


def _unsigned(groups: np.ndarray, last: int) -> np.ndarray:
    """The range holds zero, which has a code of its own."""
    low = np.minimum(groups.min(axis=(1, 3), keepdims=True), 0.0)
    high = np.maximum(groups.max(axis=(1, 3), keepdims=True), 0.0)
    scale = (high - low) / np.float32(last)
    scale = np.where(scale > 0.0, scale, np.float32(1.0))
    zero = np.clip(np.rint(-low / scale), 0, last)
    return (np.clip(np.rint(groups / scale) + zero, 0, last) - zero) * scale


# ------------------------------------------------------------------------------------------ formats
#: Numbers that are rounded at once, so that they stay in the processor's cache.
_AT_ONCE = 2**16


@dataclass(frozen=True)
class NumberFormat:
    """Rounding to nearest, ties to even, into ``dtype`` (None: see ``rounded``).

    ``unit`` is the largest relative error of a normal number, ``least`` the largest absolute error
    below the normal range; a number beyond ``largest`` may become infinite. ``lost`` are the last
    bits of a float32 that are 0, where that is all that sets the format apart.
    """

    name: str
    unit: float
    least: float
    largest: float
    rounded: Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]
    lost: int = 0

    @property
    def largest_exponent(self) -> float:
        """The largest whole n for which exp(-n) is a normal number."""
        return float(math.floor(-math.log(self.least / self.unit))) if self.least else 708.0


def _cast(dtype: type) -> Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]:
    def rounded(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        with np.errstate(over="ignore"):  # beyond the largest number is infinite, as on a device
            return values.astype(dtype).astype(values.dtype)

    return rounded


def _cut(lost: int) -> Callable[[Float32[np.ndarray, "..."]], Float32[np.ndarray, "..."]]:
    """Rounds to the nearest number whose last ``lost`` bits are 0, ties to even."""
    below_half, mask = np.uint32(2 ** (lost - 1) - 1), np.uint32(2**32 - 2**lost)

    def rounded(values: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
        single = np.ascontiguousarray(values).reshape(-1)
        narrowed = np.empty_like(single)
        for start in range(0, len(single), _AT_ONCE):
            part = single[start : start + _AT_ONCE]
            bits, out = part.view(np.uint32), narrowed[start : start + _AT_ONCE].view(np.uint32)
            # half of what is cut off, less one where the last kept bit is even: ties go to even
            np.right_shift(bits, np.uint32(lost), out=out)
            out &= np.uint32(1)
            out += below_half
            out += bits
            out &= mask
            with np.errstate(over="ignore", invalid="ignore"):
                has_nan = np.isnan(np.dot(part, part))
            if has_nan:  # its bits may have run over
                is_nan = np.isnan(part)
                narrowed[start : start + _AT_ONCE][is_nan] = part[is_nan]
        return narrowed.reshape(values.shape)

    return rounded


#: Bits of a float32 that these formats lack.
_LOST_TF32, _LOST_BFLOAT16 = 13, 16

_to_tf32, _to_bfloat16 = _cut(_LOST_TF32), _cut(_LOST_BFLOAT16)
_cast_to_bfloat16 = _cast(ml_dtypes.bfloat16)


def _tf32(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Ten bits of mantissa behind the first one, in the exponents of float32."""
    return _to_tf32(values.astype(np.float32, copy=False)).astype(values.dtype, copy=False)


def _bfloat16(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Seven bits of mantissa behind the first one, in the exponents of float32."""
    return _to_bfloat16(values) if values.dtype == np.float32 else _cast_to_bfloat16(values)


def _largest(bits: int, exponent: int) -> float:
    """The largest number with so many bits of mantissa, the first one included."""
    return (2.0 - 2.0 ** (1 - bits)) * 2.0**exponent


#: Formats by the name that presets use.
NUMBER_FORMATS: dict[str, NumberFormat] = {
    form.name: form
    for form in (
        NumberFormat("float64", 2.0**-53, 0.0, float(np.finfo(np.float64).max), _cast(np.float64)),
        NumberFormat("float32", 2.0**-24, 2.0**-150, _largest(24, 127), _cast(np.float32)),
        NumberFormat("tf32", 2.0**-11, 2.0**-137, _largest(11, 127), _tf32, _LOST_TF32),
        NumberFormat("float16", 2.0**-11, 2.0**-25, _largest(11, 15), _cast(np.float16)),
        NumberFormat("bfloat16", 2.0**-8, 2.0**-134, _largest(8, 127), _bfloat16, _LOST_BFLOAT16),
    )
}


def rounded_to(values: Float[np.ndarray, "..."], name: str) -> Float[np.ndarray, "..."]:
    r"""``values`` rounded to nearest, ties to even, in the format ``name``; same shape and dtype.

    :math:`|fl(x) - x| \le u |x|` in the normal range, with u the format's ``unit``. Numbers beyond
    its largest become infinite; nan and infinities stay. A format as wide as the dtype
    of ``values`` changes nothing: they are returned themselves.
    Raises KeyError for a name that is not in ``NUMBER_FORMATS``. Oracle in tests: torch, and for
    tf32 the definition in integers.
    """
    form = NUMBER_FORMATS[name]
    is_wider = 2.0 * form.unit <= float(np.finfo(values.dtype).eps)
    return values if is_wider else form.rounded(values)


# ------------------------------------------------------------------------------------------ schemes
#: Schemes by the name that presets use.
_SCHEMES: dict[str, Code] = {
    "int8_rows": Code("int8", 1, 0, 127.5),
    "int4_groups_of_128": Code("int4", 1, 128, 7.5),
    "fp8_tensor": Code("e4m3", 0, 0, 448.0),
    "fp8_blocks_of_128": Code("e4m3", 128, 128, 448.0),
}

#: All that a weight can be stored as: number formats and schemes.
WEIGHT_STORAGE = tuple(dict.fromkeys([*_SCHEMES, *NUMBER_FORMATS]))


def stored_as(
    weight: Float[np.ndarray, "experts hidden"], storage: str
) -> Float[np.ndarray, "experts hidden"]:
    r"""What is left of ``weight`` after it was stored as ``storage``, in its own dtype.

    A number format, or codes times scales made in float32 by rounding to nearest: ``int8_rows``
    (scale amax / 127.5 of a row), ``int4_groups_of_128`` (amax / 7.5 of 128 columns),
    ``fp8_tensor`` and ``fp8_blocks_of_128`` (e4m3, amax / 448).

    Raises
    ------
    KeyError
        For a name that is not in ``WEIGHT_STORAGE``.

    Oracle in tests: that of ``decoded``.
    """
    if storage in NUMBER_FORMATS:
        return rounded_to(weight, storage)
    return decoded(weight.astype(np.float32), _SCHEMES[storage]).astype(weight.dtype)


# ------------------------------------------------------------------------------------------- levels
#: Columns that are looked at, from the first; sorting all of a wide row would cost more than
#: reading it.
PREFIX = 512

#: Width of a window: the smallest group in common use, so that no window mixes more than two.
WINDOW = 32

#: Formats with more explicit mantissa bits than this hardly repeat a value in 32 draws.
_COUNTED_BITS = 12


def distinct_values(values: Float[np.ndarray, "rows columns"]) -> Int64[np.ndarray, "rows"]:
    """Number of different values in each row, 0 without columns. Oracle in tests: len(set(...))."""
    if not values.shape[1]:
        return np.zeros(len(values), np.int64)
    ordered = np.sort(values, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)


def window_levels(values: Float[np.ndarray, "rows columns"]) -> Float64[np.ndarray, "rows"]:
    """Mean number of different values in windows of 32 columns, over the first 512.

    About 31.6 for Gaussian rows in bfloat16, 28 to 30 for 8-bit integers and 26 for 8-bit floats
    (e4m3); at most 16 for 4-bit integers in groups of a multiple of 32, 4 for 2-bit. Windows of
    zeros are left out: a part that was never written is no sign of quantisation. nan for rows
    without any other window.
    """
    usable = min(values.shape[1], PREFIX) // WINDOW * WINDOW
    if not usable:
        return np.full(len(values), np.nan)
    windows = values[:, :usable].reshape(-1, WINDOW)
    written = (windows != 0.0).any(axis=1).reshape(len(values), usable // WINDOW)
    levels = distinct_values(windows).reshape(written.shape)
    counted = written.sum(axis=1)
    total = np.where(written, levels, 0).sum(axis=1)
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan)


def expected_window_levels(scale: float, mantissa_bits: int) -> float:
    r"""Different values among 32 Gaussian draws of standard deviation ``scale``, as stored.

    :math:`\sum_v 1 - (1 - p_v)^{32}` over the numbers v of a binary format with ``mantissa_bits``
    explicit bits, p_v = density times the width that rounds to v: the spacing, but 3/4 of it for
    powers of two. 32 beyond 12 bits. Subnormal numbers and overflow are not modelled. nan for
    scale 0. Oracle in tests: Monte Carlo with ml_dtypes.
    """
    if not np.isfinite(scale) or scale <= 0.0:
        return float("nan")
    if mantissa_bits > _COUNTED_BITS:
        return float(WINDOW)
    exponents = np.floor(np.log2(scale)) + np.arange(-20.0, 4.0)
    numbers = np.exp2(exponents)[:, None] * (1.0 + np.arange(2**mantissa_bits) / 2**mantissa_bits)
    width = np.repeat(np.exp2(exponents - mantissa_bits)[:, None], 2**mantissa_bits, axis=1)
    width[:, 0] *= 0.75  # the numbers below a power of two are twice as dense
    density = np.exp(-0.5 * (numbers / scale) ** 2) / (scale * np.sqrt(2.0 * np.pi))
    missed = (1.0 - np.minimum(density * width, 1.0)) ** WINDOW
    return float(2.0 * (1.0 - missed).sum())


# -------------------------------------------------------------------------------------------- casts
Matrix = Float32[np.ndarray, "rows columns"]

#: Rows that are tried before all of them.
_FIRST = 2

#: Values on a grid that lie between two steps may go either way: this share may be a step off.
_TIES = 1e-3


def _cut_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits, as a copy of raw memory makes it."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


#: Plain casts from float32, the finest first. ml_dtypes rounds to nearest, ties to even.
CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp16": _cast(np.float16),
    "bf16": _cast(ml_dtypes.bfloat16),
    "bf16 by cutting off bits": _cut_bfloat16,
    "fp8 e4m3": _cast(ml_dtypes.float8_e4m3fn),
    "fp8 e5m2": _cast(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class _Grid:
    """Numbers that a scale is multiplied by; the largest value is ``top`` steps."""

    name: str
    tops: tuple[float, ...]
    nearest: Callable[[np.ndarray], np.ndarray]


#: Symmetric grids. Both conventions for the largest value of an integer grid are in use.
_GRIDS = (
    _Grid("fp8 e4m3", (448.0,), _cast(ml_dtypes.float8_e4m3fn)),
    _Grid("int8", (127.0, 127.5), lambda steps: np.clip(np.rint(steps), -128, 127)),
    _Grid("int4", (7.0, 7.5), lambda steps: np.clip(np.rint(steps), -8, 7)),
)

#: Rows and columns that share a scale; None for all of them.
_SCOPES: dict[str, tuple[int | None, int | None]] = {
    "one scale": (None, None),
    "a scale for each row": (1, None),
    "a scale for 128 x 128 values": (128, 128),
    "a scale for 128 values": (1, 128),
    "a scale for 64 values": (1, 64),
    "a scale for 32 values": (1, 32),
}


def cast_of(
    values: Float[np.ndarray, "rows columns"], others: Float[np.ndarray, "rows columns"]
) -> str | None:
    """The cast that makes ``others`` of ``values``, bit for bit; None if there is none.

    The finest that fits. Equal matrices give None. From float64 the cast to float32 comes first
    ("fp32" when that is all). Oracle in tests: torch's casts.
    """
    if np.array_equal(values, others):
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = values.astype(np.float32), others.astype(np.float32)
        if not np.array_equal(after, others):
            return None
        if np.array_equal(before, after):
            return "fp32"
        for name, cast in CASTS.items():
            if np.array_equal(cast(before[:1]), after[:1]) and np.array_equal(cast(before), after):
                return name
    return None


def grid_of(
    values: Float[np.ndarray, "rows columns"],
    others: Float[np.ndarray, "rows columns"],
    precision: float,
) -> str | None:
    """The symmetric quantisation with scales that makes ``others`` of ``values``; None if none.

    A scale is the largest absolute value of its scope over the largest step; values go to the
    nearest step and are multiplied by the scale again. ``precision`` is the relative rounding of
    the stored products (2^-8 for bf16). Grids with a zero point, and scales chosen by search, are
    not recognised: what cannot be told exactly is noise.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        before, after = values.astype(np.float32), others.astype(np.float32)
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return None
    for name, largest, top, nearest in _grids(before):
        scales = _scales(largest[:_FIRST], top)
        first = nearest(before[:_FIRST] / scales) * scales
        near = _is_near(first, after[:_FIRST], scales, precision)
        if near.mean() < 1.0 - 10.0 * _TIES:  # few values: a tie weighs more
            continue
        scales = _scales(largest, top)
        if _fits(nearest(before / scales) * scales, after, scales, precision):
            return name
    return None


def _scales(largest: Matrix, top: float) -> Matrix:
    return np.where(largest > 0.0, largest / np.float32(top), np.float32(1.0))


def _grids(
    values: Matrix,
) -> Iterator[tuple[str, Matrix, float, Callable[[np.ndarray], np.ndarray]]]:
    """Name, largest value of each scope, the largest step and the rounding, for each grid."""
    sizes = np.abs(values)
    for scope, (rows, columns) in _SCOPES.items():
        largest = _largest_size(sizes, rows, columns)
        if largest is None:
            continue
        for grid in _GRIDS:
            for top in grid.tops:
                yield f"{grid.name}, {scope}", largest, top, grid.nearest


def _largest_size(values: Matrix, rows: int | None, columns: int | None) -> Matrix | None:
    """Largest value of its scope for each value; None where the scope does not divide."""
    shape = values.shape
    height = shape[0] if rows is None else rows
    width = shape[1] if columns is None else columns
    if not values.size or shape[0] % height or shape[1] % width:
        return None
    blocks = values.reshape(shape[0] // height, height, shape[1] // width, width)
    largest = blocks.max(axis=(1, 3), keepdims=True)
    return np.broadcast_to(largest, blocks.shape).reshape(shape)


def _is_near(
    image: Matrix, others: Matrix, scales: Matrix, precision: float
) -> Bool[np.ndarray, "rows columns"]:
    return np.abs(image - others) <= 1.01 * precision * np.abs(image) + 1e-6 * scales


def _fits(image: Matrix, others: Matrix, scales: Matrix, precision: float) -> bool:
    near = _is_near(image, others, scales, precision)
    if near.mean() < 1.0 - _TIES:
        return False
    return bool((np.abs(image - others) <= 1.01 * scales + precision * np.abs(image))[~near].all())


# --------------------------------------------------------------------------------- selection biases
#: One update of a selection bias in loss-free balancing (arXiv 2408.15664: 0.001).
UPDATE_STEP = 1e-3


def to_bfloat16(values: Float[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Values rounded to float32 and then to bfloat16, ties to even. Oracle in tests: torch."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def ulp_bfloat16(value: float) -> float:
    """Step of bfloat16 at |value|, 2^(floor(log2 |value|) - 7), at least 2^-133; 0 for 0 and inf.

    Oracle in tests: the next number in the bits of torch's bfloat16.
    """
    if value == 0.0 or not np.isfinite(value):
        return 0.0
    exponent = int(np.frexp(value)[1]) - 1
    return float(2.0 ** (max(exponent, -126) - 7))


@dataclass(frozen=True)
class BiasPrecision:
    """Selection biases before and after a cast to bfloat16, as they are and recentred.

    ``middle`` is the middle of their range: subtracting it from every bias changes no difference.
    ``lost_update_share``: experts whose bias an update of 0.001 up or down leaves where it is in
    bfloat16.
    """

    num_distinct: int
    num_distinct_bf16: int
    num_distinct_bf16_recentred: int
    ulp_bf16: float
    spread: float
    middle: float
    lost_update_share: float
    largest_shift: float


def bias_precision(bias: Float[np.ndarray, "experts"]) -> BiasPrecision:
    """Figures of one selection bias. ``spread`` is its standard deviation, ddof 0, or inf."""
    values = bias.astype(np.float64)
    rounded = to_bfloat16(bias)
    middle = 0.5 * float(values.max()) + 0.5 * float(values.min())
    with np.errstate(over="ignore"):
        spread = float(values.std())
    steps = [to_bfloat16(to_bfloat16(bias) + sign * UPDATE_STEP) == rounded for sign in (1.0, -1.0)]
    return BiasPrecision(
        num_distinct=len(np.unique(values)),
        num_distinct_bf16=len(np.unique(rounded)),
        num_distinct_bf16_recentred=len(np.unique(to_bfloat16(values - middle))),
        ulp_bf16=ulp_bfloat16(float(np.abs(values).max())),
        spread=spread,
        middle=middle,
        lost_update_share=float((steps[0] & steps[1]).mean()),
        largest_shift=float(np.abs(rounded - values).max()),
    )


# ----------------------------------------------------------------------------------- gaps of scores
def sum_error(
    input_norm: Float[np.ndarray, "tokens"],
    width: int,
    depth: int,
    longest_row: float,
    largest_bias: float = 0.0,
) -> Float64[np.ndarray, "tokens"]:
    r"""Largest error of a logit :math:`W y + b` of ``width`` products, summed in float32.

    Each product meets ``depth`` roundings at most. That is :func:`error_of_sizes` of
    :math:`\max_i |w_i| |y| + \max_i |b_i|`, by Cauchy-Schwarz. In logits.
    Source: docs/theory.md E4. Oracle in tests: exact sums, sums in every known order.
    """
    sizes = longest_row * input_norm.astype(np.float64) + largest_bias
    return error_of_sizes(sizes, width, depth)


def error_of_sizes(
    sizes: Float64[np.ndarray, "tokens"], width: int, depth: int
) -> Float64[np.ndarray, "tokens"]:
    r"""The same from the sizes of the terms, :math:`s \ge \sum_d |w_d y_d| + |b|`.

    :math:`\gamma_{n+1} s + 2 (D + 1) \eta`: one more rounding for the bias, and for each product
    that falls below the normal numbers the error :math:`\eta = 2^{-150}` instead of a relative one
    (sums are exact there), doubled for the roundings that it meets itself. inf where partial sums
    may leave the range, so that another order could end in infinity; 0 where all terms are 0.
    """
    form = NUMBER_FORMATS["float32"]
    relative = gamma(depth + 1, form.unit)
    with np.errstate(invalid="ignore", over="ignore"):
        error = relative * sizes + 2.0 * (width + 1) * form.least
        error = np.where(sizes * (1.0 + relative) < form.largest, error, np.inf)
    return np.where(sizes > 0.0, error, np.where(sizes == 0.0, 0.0, np.nan))


def map_gap(
    one: Float64[np.ndarray, "tokens"],
    other: Float64[np.ndarray, "tokens"],
    logit_map: LogitMap,
    number_format: str,
) -> Float64[np.ndarray, "tokens"]:
    r"""Difference of two logits behind a map above which its rounding keeps the order.

    An engine takes :math:`c \tanh(m z / c)` in a few steps: two products and a quotient with
    constants that are rounded themselves, and a tanh that is right within two units; tanh passes a
    relative error on without growth. 16 units cover it, and as many times what is lost below the
    normal numbers, which c or m may enlarge. A cap that both have reached leaves no difference.
    Oracle in tests: the map in float32, by numpy and torch.
    """
    form = NUMBER_FORMATS[number_format]
    cap = logit_map.soft_cap if np.isfinite(logit_map.soft_cap) else 0.0
    lost = 2.0 * form.least * (1.0 + logit_map.multiplier + cap)
    return 16.0 * (form.unit * (np.abs(one) + np.abs(other)) + lost)


def format_gap(
    one: Float64[np.ndarray, "tokens"], other: Float64[np.ndarray, "tokens"], number_format: str
) -> Float64[np.ndarray, "tokens"]:
    r"""Difference above which rounding two numbers to a format keeps the larger one larger.

    :math:`u (|a| + |b|) + 2 \eta`: then :math:`a - u |a| - \eta > b + u |b| + \eta`, which are
    bounds of the rounded numbers. If it holds for the least chosen and the largest other number it
    holds for all pairs, because :math:`x \mp u |x|` increases with x.
    Oracle in tests: torch and ml_dtypes.
    """
    form = NUMBER_FORMATS[number_format]
    return form.unit * (np.abs(one) + np.abs(other)) + 2.0 * form.least
