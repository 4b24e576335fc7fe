"""JSON and TOML of others end in values or in a sentence, and in little memory."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegeom.core.documents import DocumentError, parse_json, parse_toml
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


@given(st.text(alphabet="ab.=[]\"'1_\n {},#", max_size=60))
def test_toml_is_what_the_library_reads(text):
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(DocumentError):
            parse_toml(text)
    else:
        assert parse_toml(text) == expected


def test_json_is_read_as_deep_as_it_can_be_written():
    def nested(depth):
        objects, lists = depth // 2, depth - depth // 2
        return b'{"a":' * objects + b"[" * lists + b"]" * lists + b"}" * objects

    assert parse_json(nested(100))
    with pytest.raises(DocumentError, match="nested too deeply"):
        parse_json(nested(101))
