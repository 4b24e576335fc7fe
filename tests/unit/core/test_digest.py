"""Digests: other values have other digests, and the same value has one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.digest import digest_of, digest_of_file

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def told(value: object) -> str:
    """Values that differ differ in this; lists and tuples are one."""
    if isinstance(value, dict):
        return f"{{{sorted((key, told(one)) for key, one in value.items())}}}"
    return f"[{[told(one) for one in value]}]" if isinstance(value, list | tuple) else repr(value)


@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_values_have_one_digest_exactly_when_they_are_equal(first, second):
    assert (digest_of(*first) == digest_of(*second)) == (told(first) == told(second))


def test_no_border_between_values_can_be_moved():
    values = [
        ("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), (["ab", "c"],), (["ab"], "c"), ({"ab": "c"},),
        ("text 1\na",), ("",), (), (None,), ("None",), (1,), ("1",), (True,), (1.0,), ([],), ({},),
    ]  # fmt: skip
    assert len({digest_of(*value) for value in values}) == len(values)


def test_arrays_differ_by_dtype_shape_and_bits():
    numbers = np.arange(8, dtype=np.uint8)
    arrays = [numbers, numbers.reshape(2, 4), numbers.view(np.int8), numbers.view(">u2")]
    arrays += [numbers.view(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
    arrays += [numbers.view("<u2"), numbers[:0], np.array(0.0), np.array(-0.0), numbers.tobytes()]
    assert len({digest_of(array) for array in arrays}) == len(arrays)
    assert digest_of(np.arange(8).reshape(2, 4).T) == digest_of(
        np.arange(8).reshape(2, 4).T.copy(order="C")
    )


def test_a_digest_of_bytes_and_files_is_that_of_hashlib(tmp_path):
    raw = bytes(range(256)) * 9000
    (tmp_path / "file").write_bytes(raw)
    assert digest_of_file(tmp_path / "file") == hashlib.sha256(raw).hexdigest()
    assert digest_of(raw) == hashlib.sha256(b"bytes %d\n%b" % (len(raw), raw)).hexdigest()


def test_records_paths_and_numbers_of_numpy_are_taken_and_nothing_else():
    @dataclass
    class Record:
        weight: np.ndarray
        name: str

    one = Record(np.ones(3), "a")
    assert (
        digest_of(one) == digest_of(Record(np.ones(3), "a")) != digest_of(Record(np.ones(3), "b"))
    )
    assert digest_of(Path("a")) == digest_of("a")
    assert digest_of(np.int64(3), np.float64(0.5)) == digest_of(3, 0.5)
    assert digest_of({"a", "b"}) == digest_of({"b", "a"})
    with pytest.raises(TypeError, match="object: no value"):
        digest_of(object())
