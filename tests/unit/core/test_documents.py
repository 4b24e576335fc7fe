"""JSON and TOML of others end in values or in a sentence, and in little memory; values have one digest."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.documents import DocumentError, parse_json, parse_toml, record_of
from moegeom.core.limits import MOST_DOTS
from tests.ends import work_ends

NINES = "9" * 5000


HOSTILE_TOML = [
    (".".join("a" * 40_000) + " = 1", "dots"),
    ("a = 1\n" * 100_000, "characters"),
    (f"a = {NINES}", "is not TOML"),
    (f"a = 0x{'f' * 5000}", "beyond 64 bits"),
    (f"a = [{{b = 0b1{'0' * 64}}}]", "beyond 64 bits"),
    ("a = " + "[" * 100_000, "nested too deeply"),
    ("a = 1\na = 2", "is not TOML"),
]
HOSTILE_JSON = [
    (NINES.encode(), "beyond 64 bits"),
    (b"[" + b"18446744073709551616]", "beyond 64 bits"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": \xff}', "not UTF-8 at byte 6"),
    (b"{", "is not JSON"),
    (b"[" + b"1," * 3_000_000 + b"1]", "values"),
    (b" " * (1 << 27), "bytes"),
]


def test_a_hostile_document_is_a_sentence():
    for parse, hostile in ((parse_toml, HOSTILE_TOML), (parse_json, HOSTILE_JSON)):
        for text, words in hostile:
            with work_ends(), pytest.raises(DocumentError, match=words):
                parse(text)


def test_as_many_dots_as_are_allowed_are_read():
    line = ".".join("a" * (MOST_DOTS + 1))
    text = "\n".join(f"x{n}.{line[2:]} = 1" for n in range(1000))
    with work_ends():
        parse_toml(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_json_writes_comes_back(value):
    assert parse_json(json.dumps(value).encode()) == value


def test_json_is_read_as_deep_as_it_can_be_written():
    def nested(depth):
        objects, lists = depth // 2, depth - depth // 2
        return b'{"a":' * objects + b"[" * lists + b"]" * lists + b"}" * objects

    assert parse_json(nested(100))
    with pytest.raises(DocumentError, match="nested too deeply"):
        parse_json(nested(101))


@dataclass
class Leaf:
    name: str
    size: Annotated[float, Meta(ge=0.0)] = 1.0

    def __post_init__(self):
        if self.name == "root":
            raise ValueError("a root is no leaf")


@dataclass
class Tree:
    leaves: Annotated[tuple[Leaf, ...], Meta(min_length=1, max_length=2)]
    kind: Literal["oak", "elm"] | None = None
    heights: dict[str, dict[str, int]] = field(default_factory=dict)


LEAF = {"name": "a"}
MISFITS: list[tuple[Any, str, str]] = [
    ([], "it is a list of 0, expected a table", ""),
    ({}, "key 'leaves' is missing", ""),
    ({"leafs": []}, "unknown key 'leafs'", "Did you mean leaves? Known: leaves, kind, heights."),
    ({"leaves": [], "kinds": 1}, "leaves is a list of 0, expected a list of at least 1 entry", ""),
    ({"leaves": {}}, "leaves is a table, expected a list", "begins with [[leaves]]"),
    ({"leaves": [LEAF | {"sice": 1}]}, "leaves[0]: unknown key 'sice'", "Did you mean size?"),
    ({"leaves": [LEAF | {"size": True}]}, "leaves[0].size is true, expected a number", ""),
    ({"leaves": [LEAF | {"size": math.nan}]}, "size is nan, expected a finite number", ""),
    ({"leaves": [LEAF, {"name": "root"}]}, "leaves[1]: a root is no leaf", ""),
    ({"leaves": [{"name": "\x1b" * 999}], "kind": 1}, "kind is 1, expected one of elm, oak, null", ""),
    ({"leaves": [LEAF], "kind": "oaks"}, "kind is 'oaks', expected one of", "Did you mean oak?"),
    ({"leaves": [LEAF], "kind": "\x1b" * 999}, "kind is '\\x1b", ""),
    ({"leaves": [LEAF], "kind": "\ud800"}, "holds '\\ud800', which is no character", ""),
    ({"leaves": [LEAF], "heights": {"a": {}, "\x1b": {"m": 1, "n": "2"}, "c": {"n": 3.5}}},
     "heights.\\x1b.n is '2', expected a whole number", ""),
]  # fmt: skip


def test_what_is_no_record_is_told_with_its_place_and_left_as_it_was():
    for document, words, hint in MISFITS:
        text = repr(document)
        with pytest.raises(DocumentError) as refused:
            record_of(Tree, document)
        assert words in str(refused.value), (words, str(refused.value))
        assert hint in refused.value.hint
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 200
        assert repr(document) == text
    assert record_of(TypedDict("kind", {"a": int}), {"a": 1, "b": 2}) == {"a": 1}


def test_of_many_entries_the_refused_one_is_named_soon():
    heights: dict[str, Any] = {str(n): {"a": n} for n in range(100_000)}
    heights["77777"]["a"] = None
    with work_ends(), pytest.raises(DocumentError, match="heights.77777.a is null"):
        record_of(Tree, {"leaves": [LEAF], "heights": heights})


# ------------------------------------------------------------------------------------------ digests
DIGESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def told(value: object) -> str:
    """Values that differ differ in this; lists and tuples are one."""
    if isinstance(value, dict):
        return f"{{{sorted((key, told(one)) for key, one in value.items())}}}"
    return f"[{[told(one) for one in value]}]" if isinstance(value, list | tuple) else repr(value)


@given(st.lists(DIGESTED, max_size=4), st.lists(DIGESTED, max_size=4))
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
