"""Numbers in few bits: casts of a bias, levels of rows, rounding, orders of summation, codes.

Oracles: torch, compressed-tensors, TF32 and sums in exact fractions, orders in plain Python.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from torch.ao.quantization import PerChannelMinMaxObserver

from moegeom.geometry import number_formats as formats
from moegeom.geometry.number_formats import FLOATS, Code, decoded, in_eight_bits
from moegeom.geometry.rounding import SUMMATION_ORDERS, UNIT_FLOAT32, gamma, ordered_sums

SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False)
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# ------------------------------------------------------------------------------ a bias in bfloat16
def test_updates_are_lost_beyond_one_half_and_four_around_seven_are_one():
    """Half a step is .00195 above one half and .00098 below it (sglang, its source)."""
    # down from one half the step is smaller
    edges = [formats.bias_precision(np.array([v])).lost_update_share for v in (-0.5, 0.5, 0.504)]
    assert_array_equal(edges, [0.0, 0.0, 1.0])
    bias = formats.bias_precision(np.float32([7.0, 7.001, 7.002, 7.003]))
    assert (bias.num_distinct, bias.num_distinct_bf16) == (4, 1)
    assert bias.num_distinct_bf16_recentred == 4
    assert_array_equal([bias.ulp_bf16, bias.lost_update_share], [2.0**-5, 1.0])
    assert_allclose([bias.spread, bias.largest_shift], [0.001 * np.sqrt(1.25), 0.003], rtol=1e-3)
    assert_allclose(bias.middle, 7.0015, rtol=1e-6)
    assert_equal(formats.bias_precision(np.float32([-7.0, 0.1])).ulp_bf16, 2.0**-5)
    flat = formats.bias_precision(np.full(5, 0.25))
    assert (flat.num_distinct, flat.num_distinct_bf16, flat.num_distinct_bf16_recentred) == (1,) * 3
    assert_array_equal([flat.spread, flat.middle, flat.largest_shift], [0.0, 0.25, 0.0])
    zeros = formats.bias_precision(np.zeros(4, np.float32))
    assert_array_equal([zeros.ulp_bf16, zeros.lost_update_share], [0.0, 0.0])
    assert formats.bias_precision(np.float32([0.3])).num_distinct == 1


# ---------------------------------------------------------------------------------------- rounding
@pytest.mark.parametrize("name", TORCH)
def test_rounding_is_that_of_torch(name: str) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(20_000) * 2.0 ** random.integers(-40, 40, 20_000)).astype("f4")
    values = np.concatenate([values, np.float32([0.0, -0.0, np.inf, -np.inf, 65520.0, 1e38])])
    expected = torch.from_numpy(values).to(TORCH[name]).to(torch.float32).numpy()
    assert_array_equal(formats.rounded_to(values, name), expected)


@given(SINGLES)
def test_tf32_keeps_the_nearest_eleven_bits_and_ties_go_to_the_even_ones(value: float) -> None:
    _, exponent = np.frexp(np.float32(value))
    step = Fraction(2) ** (max(int(exponent), -125) - 11)
    expected = round(Fraction(value) / step) * step
    rounded = formats.rounded_to(np.array([np.float32(value)]), "tf32")[0]
    if abs(expected) <= Fraction(float(np.finfo(np.float32).max)):
        assert Fraction(float(rounded)) == expected
    else:
        assert np.isinf(rounded)


@pytest.mark.parametrize("name", formats.NUMBER_FORMATS)
@given(one=SINGLES, other=SINGLES)
def test_the_error_is_within_the_unit_and_order_survives_the_gap(
    name: str, one: float, other: float
) -> None:
    form = formats.NUMBER_FORMATS[name]
    pair = np.array([one, other], np.float64)
    rounded = formats.rounded_to(pair, name)
    finite = np.isfinite(rounded)
    error = np.abs(rounded[finite] - pair[finite])
    assert (error <= form.unit * np.abs(pair[finite]) + form.least).all()
    if finite.all() and one - other > formats.format_gap(pair[:1], pair[1:], name)[0]:
        assert rounded[0] > rounded[1]
    odd = np.float32([np.nan, np.inf, -np.inf])
    assert_array_equal(formats.rounded_to(odd, name), odd)


# ------------------------------------------------------------------------------------------ levels
SMALL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.0])


@given(
    arrays(np.float32, array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9), elements=SMALL)
)
def test_distinct_values_are_what_a_set_holds(values):
    assert_array_equal(formats.distinct_values(values), [len(set(row)) for row in values.tolist()])


def test_whole_windows_of_the_prefix_are_counted_one_by_one_and_zeros_left_out():
    ones, zeros, all_apart = (
        np.ones(formats.WINDOW),
        np.zeros(formats.WINDOW),
        np.arange(formats.WINDOW),
    )
    for parts, levels in (
        ([ones, all_apart], (1 + formats.WINDOW) / 2),
        ([all_apart, zeros[1:]], formats.WINDOW),  # the rest is shorter than a window
        ([zeros, all_apart], formats.WINDOW),
    ):
        assert_array_equal(formats.window_levels(np.concatenate(parts)[None]), [levels])
    long = np.tile(np.arange(2.0 * formats.PREFIX), (3, 1))
    long[:, formats.PREFIX :] = 0.0
    assert_array_equal(formats.window_levels(long), [formats.WINDOW] * 3)
    for rows in (
        *(np.ones((2, columns)) for columns in (0, 1, formats.WINDOW - 1)),
        np.zeros((2, formats.WINDOW)),
    ):
        assert_array_equal(formats.window_levels(rows), [np.nan, np.nan])
    assert formats.window_levels(np.empty((0, 64))).shape == (0,)


def test_more_mantissa_bits_hold_more_values_at_any_power_of_two_and_at_most_a_window():
    bits = (0, 2, 3, 7, 10, 12)
    levels = [formats.expected_window_levels(0.02, b) for b in bits]
    assert_array_equal(np.diff(levels) > 0.0, True)
    assert max(levels) < formats.WINDOW
    assert_array_equal(
        [formats.expected_window_levels(0.02, b) for b in (13, 23, 52)], formats.WINDOW
    )
    for power in (-14, -1, 5):
        scaled = [formats.expected_window_levels(0.02 * 2.0**power, b) for b in bits]
        assert_allclose(scaled, levels, rtol=1e-12)
    for scale in (0.0, -1.0, np.nan, np.inf):
        assert_array_equal([formats.expected_window_levels(scale, b) for b in (3, 23)], np.nan)


# -------------------------------------------------------------------------------------------- sums
WITH_SUMS = [name for name, order in SUMMATION_ORDERS.items() if order.sums is not None]
WIDTHS = (1, 2, 7, 64, 1000, 2048)


def drawn(width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two tokens and three rows with large terms that cancel."""
    random = np.random.default_rng(seed)
    scale = 2.0 ** random.integers(-8, 8, width)
    values, rows = (random.standard_normal((n, width)) * scale for n in (2, 3))
    return values.astype(np.float32), rows.astype(np.float32)


def exact(y: np.ndarray, w: np.ndarray) -> Fraction:
    pairs = zip(y.tolist(), w.tolist(), strict=True)
    return sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction())


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_every_order_are_within_gamma_of_the_exact_ones(width: int) -> None:
    values, rows = drawn(width)
    sums = {name: ordered_sums(values, rows, name) for name in WITH_SUMS}
    for t, y in enumerate(values):
        for e, w in enumerate(rows):
            size, total = np.abs(y.astype(np.float64) * w).sum(), exact(y, w)
            for name, table in sums.items():
                bound = gamma(SUMMATION_ORDERS[name].depth(width), UNIT_FLOAT32)
                assert abs(Fraction(float(table[t, e])) - total) <= Fraction(bound * size), name


@pytest.mark.parametrize("width", WIDTHS)
def test_any_order_of_a_matrix_product_is_within_the_error_of_a_sum(width: int) -> None:
    values, rows = drawn(width, seed=1)
    norm, longest = np.linalg.norm(values, axis=1), float(np.linalg.norm(rows, axis=1).max())
    bound = formats.sum_error(norm, width, SUMMATION_ORDERS["any"].depth(width), longest, 0.5)
    totals = [[exact(y, w) + Fraction(1, 2) for w in rows] for y in values]
    random = np.random.default_rng(2)
    for _ in range(5):
        order = random.permutation(width)
        logits = values[:, order] @ rows[:, order].T + np.float32(0.5)
        for t, row in enumerate(logits.tolist()):
            error = [abs(float(Fraction(z) - s)) for z, s in zip(row, totals[t], strict=True)]
            assert max(error) <= bound[t]


def test_a_sequence_is_added_from_the_left_and_pairs_first():
    values, rows = drawn(50)
    total = np.float32(0.0)
    for y, w in zip(values[1], rows[2], strict=True):
        total = np.float32(total + np.float32(y * w))
    assert ordered_sums(values, rows, "sequential")[1, 2] == total
    values, rows = drawn(4)
    p = values[0] * rows[0]
    expected = np.float32(p[0] + p[1]) + np.float32(p[2] + p[3])
    assert ordered_sums(values, rows, "pairwise")[0, 0] == expected
    with pytest.raises(ValueError, match="has a bound and no sums"):
        ordered_sums(*drawn(4), "any")
    assert gamma(2**24, UNIT_FLOAT32) == np.inf


def test_the_order_of_the_router_kernel_is_threads_then_lanes_then_warps() -> None:
    width = 2048
    values, rows = (a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in drawn(width))
    threads = np.zeros(128, np.float32)
    for i in range(0, width, 1024):
        for thread in range(128):
            for r in range(8):
                k = i + 8 * thread + r
                threads[thread] = np.float32(threads[thread] + values[0, k] * rows[0, k])
    total = np.float32(0.0)
    for warp in threads.reshape(4, 32):
        lanes = warp.copy()
        for step in (16, 8, 4, 2, 1):
            lanes = np.float32([lanes[n] + lanes[n ^ step] for n in range(32)])
        total = np.float32(total + lanes[0])
    assert ordered_sums(values, rows, "strided_128")[0, 0] == total


# -------------------------------------------------------------------------------------------- codes
def rows(seed: int = 0, experts: int = 5, hidden: int = 37) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((experts, hidden)).astype(np.float32)


def groups(weight: np.ndarray, height: int, width: int):
    height, width = height or len(weight), width or weight.shape[1]
    for top in range(0, len(weight), height):
        for left in range(0, weight.shape[1], width):
            yield slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127.0), (8, 127.5), (4, 7.0), (4, 8.0)])
def test_signed_integers_are_rounded_group_by_group(bits, largest):
    weight, half = rows(), 2 ** (bits - 1)
    for height, width in ((0, 0), (1, 0), (0, 1), (1, 16), (2, 8)):
        coded = decoded(weight, Code(f"int{bits}", height, width, largest))
        for part in groups(weight, height, width):
            scale = np.abs(weight[part]).max() / np.float32(largest)
            expected = np.clip(np.round(weight[part] / scale), -half, half - 1) * scale
            assert_allclose(coded[part], expected, rtol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (1, 0), (1, 8)])
def test_unsigned_integers_take_as_many_values_as_they_have_and_are_half_a_step_off(height, width):
    weight = rows(1)
    coded = decoded(weight, Code("uint4", height, width, None))
    for part in groups(weight, height, width):
        values = weight[part]
        # a group that the border cuts holds a zero beside its own numbers
        step = (max(values.max(), 0.0) - min(values.min(), 0.0)) / 15.0
        assert len(np.unique(coded[part])) <= 16
        assert np.abs(coded[part] - values).max() <= 1.01 * step


@pytest.mark.parametrize(
    ("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_eight_bit_floats_are_casts_of_scaled_rows(name, kind):
    weight = rows(2)
    plain = decoded(weight, Code(name, 0, 0, None))
    assert_array_equal(plain, weight.astype(kind).astype(np.float32))
    most = float(ml_dtypes.finfo(kind).max)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(most)
    expected = (weight / scale).astype(kind).astype(np.float32) * scale
    assert_allclose(decoded(weight, Code(name, 1, 0, most)), expected, rtol=1e-6)
    stored = decoded(weight, Code(name, 1, 0, most, is_stored=True))
    assert_array_equal(stored, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_nothing_is_made_of_zeros_and_each_block_is_a_tensor_of_its_own() -> None:
    zeros = np.zeros((3, 200), np.float32)
    for form in ("int8", "uint4", "e4m3"):
        assert_array_equal(decoded(zeros, Code(form, 1, 0, 7.0)), zeros)
    for storage in formats.WEIGHT_STORAGE:
        for dtype in (np.float32, np.float64):
            stored = formats.stored_as(zeros.astype(dtype), storage)
            assert stored.dtype == dtype, storage
            assert not stored.any(), storage
    weight = weights((130, 384))
    stored = formats.stored_as(weight, "fp8_blocks_of_128")
    for block in (np.s_[:128, 128:256], np.s_[128:, 256:]):
        alone = formats.stored_as(np.ascontiguousarray(weight[block]), "fp8_tensor")
        assert_array_equal(stored[block], alone)


@pytest.mark.parametrize("form", FLOATS)
def test_eight_bits_are_those_of_a_cast_for_every_kind_of_number(form):
    halves = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(3).integers(0, 2**32, 2**17, dtype=np.uint32)
    # halfway between two numbers, and one bit to either side of it
    bits = np.concatenate([halves, halves + 1, halves - 1, random])
    with np.errstate(all="ignore"):
        expected = bits.view(np.float32).astype(FLOATS[form]).astype(np.float32)
    coded = in_eight_bits(bits.view(np.float32), form)
    assert_array_equal(coded, expected)
    assert_array_equal(np.signbit(coded), np.signbit(expected))


# ----------------------------------------------------------------------------------- other libraries
SHAPES = ((64, 256), (130, 384))


def weights(shape: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(0)
    length = random.uniform(0.01, 3.0, shape[0])[:, None]
    return (random.standard_normal(shape) * length).astype("f4")


def theirs(weight: np.ndarray, kind: str, **options: object) -> np.ndarray:
    tensor = torch.from_numpy(weight)
    args = QuantizationArgs(type=kind, **{"symmetric": True} | options)
    if args.strategy == "group":
        grouped = tensor.reshape(len(tensor), -1, args.group_size)
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    elif args.strategy == "channel":
        low, high = tensor.amin(dim=1, keepdim=True), tensor.amax(dim=1, keepdim=True)
    else:
        low, high = tensor.min().reshape(1), tensor.max().reshape(1)
    scale, zero = calculate_qparams(low, high, args)
    return fake_quantize(tensor, scale, zero, args).numpy()


IN_8 = {"num_bits": 8, "strategy": "channel"}
IN_4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
SCHEMES = [
    (Code("int8", 1, 0, 127.5), "int", IN_8),
    (Code("int4", 1, 128, 7.5), "int", IN_4),
    (Code("uint8", 1, 0, None), "int", IN_8 | {"symmetric": False}),
    (Code("uint4", 1, 128, None), "int", IN_4 | {"symmetric": False}),
    (Code("e4m3", 0, 0, 448.0), "float", {"num_bits": 8, "strategy": "tensor"}),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("code", "kind", "options"), SCHEMES)
def test_what_is_left_is_what_compressed_tensors_leaves(shape, code, kind, options) -> None:
    weight = weights(shape)
    assert_array_equal(decoded(weight, code), theirs(weight, kind, **options))


@pytest.mark.parametrize(("width", "bits"), [(0, 8), (128, 4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_by_the_largest_code_is_that_of_torch(shape, width, bits):
    weight, largest = weights(shape), 2 ** (bits - 1) - 1
    grouped = weight.reshape(-1, weight.shape[1] if bits == 8 else 128)
    observer = PerChannelMinMaxObserver(
        qscheme=torch.per_channel_symmetric,
        dtype=torch.qint8,
        quant_min=-largest,
        quant_max=largest,
    )
    observer(torch.from_numpy(grouped))
    scale, zero = observer.calculate_qparams()
    expected = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(grouped), scale, zero.to(torch.int32), 0, -largest, largest
    ).numpy()
    # torch multiplies by the reciprocal of the scale: a value at half a step may fall otherwise
    coded = decoded(weight, Code(f"int{bits}", 1, width, float(largest))).reshape(grouped.shape)
    is_other = np.abs(coded - expected) > 1e-6 * np.abs(grouped).max(axis=1, keepdims=True)
    assert is_other.mean() < 1e-4
