"""Presets are data that parse, say what they copy, and change what they say."""

import pytest

from moegeom.core.documents import record_of_file
from moegeom.core.errors import InternalError, UsageError
from moegeom.variants.arithmetic import (
    Arithmetic,
    arithmetic,
    arithmetic_names,
    describe_arithmetics,
)


def test_each_preset_says_what_it_copies_and_its_row_says_its_steps() -> None:
    for name in arithmetic_names():
        how = arithmetic(name)
        assert how.name == name and how.text and how.source
        assert how.engine.startswith("none") or how.version
    rows = {row["name"]: row for row in describe_arithmetics()}
    assert tuple(rows) == arithmetic_names()
    assert rows["bf16-logits"]["steps"].endswith("output bfloat16")
    assert "0487d5c2" in rows["bf16-gemm-fp32-out"]["engine"]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="bf15") as caught:
        arithmetic("bf15")
    assert "bf16" in (caught.value.hint or "")


def test_a_preset_with_a_word_that_is_not_known_is_an_error() -> None:
    preset = 'text = "t"\nengine = "none"\nversion = ""\nsource = "s"\n'
    with pytest.raises(InternalError, match=r"made.toml: input is 'bfloat17', expected one of"):
        record_of_file(Arithmetic, "made", preset + 'input = "bfloat17"')
    with pytest.raises(InternalError, match="unknown key 'scores'.\n  hint: Did you mean score"):
        record_of_file(Arithmetic, "made", preset + 'scores = "red"')
