"""A profile says what it means, or an error names the key and the nearest one that is known."""

from __future__ import annotations

import re
import tomllib

import pytest

from moegeom.checks import CHECKS
from moegeom.checks.profile import DEFAULT, Ignore, Threshold
from moegeom.checks.profile_file import find_profile, parse_profile, profile_template, read_profile
from moegeom.core.errors import UsageError

WHOLE = """
select = ["MGI", "MGB203"]
require = ["MGB203"]
fail_on = "warning"
baseline = "b.json"
family_wise_error = 0.01

[severity]
MGB203 = "error"

[limits.MGB203]
fair_shares = 4
[[limits.MGB203.at]]
layers = "0-2"
fair_shares = 6.5

[[ignore]]
code = "MGN112"
layers = "3-5"
reason = "our engine keeps it"

[[threshold]]
column = "load_cv_ddof0"
at_most = { times_baseline = 1.5 }
layers = "1"
severity = "warning"

[[threshold]]
column = "gini"
at_least = 0.1
percentile = 95
"""


def test_a_whole_profile_is_read():
    profile = parse_profile(tomllib.loads(WHOLE), "moegeom.toml")
    assert profile.selects("MGI101")
    assert not profile.selects("MGN112")
    assert profile.requires("MGB203")
    assert (profile.fail_on, profile.baseline) == ("warning", "b.json")
    assert profile.family_wise_error == 0.01
    assert profile.severity == {"MGB203": "error"}
    assert [profile.limit("MGB203", "fair_shares", layer, 3.0) for layer in (1, 3)] == [6.5, 4.0]
    assert profile.ignore == (Ignore("MGN112", "our engine keeps it", frozenset({3, 4, 5})),)
    first, second = profile.thresholds
    assert first == Threshold(
        "load_cv_ddof0", "at_most", 1.5, True, frozenset({1}), severity="warning"
    )
    assert second == Threshold("gini", "at_least", 0.1, percentile=95.0)


WRONG = {
    'selct = ["MGI"]': "Did you mean select",
    'select = ["MGX"]': "no check has the code 'MGX'",
    "select = []": "select is a list of 0, expected a list of at least 1 entry",
    'fail_on = "note"': "expected one of error, warning",
    "family_wise_error = 1.5": "expected a number below 1",
    '[severity]\nMGB230 = "error"': "Did you mean MGB203",
    "[limits.MGB203]\nfair_share = 2": "Did you mean fair_shares",
    "[limits.MGG206]\nfactor = 0": "factor is 0, expected a number above 0",
    "[limits.MGI104]\nx = 1": "unknown key 'MGI104'",
    "[[limits.MGB203.at]]\nfair_shares = 2": "limits.MGB203.at[0]: key 'layers' is missing",
    '[[limits.MGB203.at]]\nlayers = "x"\nfair_shares = 2': "neither a layer nor a range",
    '[[ignore]]\ncode = "MGN112"': "has no reason",
    '[[ignore]]\ncode = "MGN999"\nreason = "x"': "no check has the code",
    '[ignore]\ncode = "MGN112"': "begins with [[ignore]]",
    '[[threshold]]\ncolumn = "gini"\nat_most = 1\nat_least = 0': "either at_most or at_least",
    '[[threshold]]\ncolumn = "gini"\nat_most = { times_base = 2 }': "Did you mean times_baseline",
    '[[threshold]]\ncolumn = "gini"\nat_most = {times_baseline = 2}\npercentile = 5': "no layer",
}


def test_what_a_profile_cannot_mean_is_an_error_that_helps():
    for text, words in WRONG.items():
        with pytest.raises(UsageError) as raised:
            parse_profile(tomllib.loads(text), "moegeom.toml")
        assert words in str(raised.value)
        assert raised.value.message.startswith("moegeom.toml")


def test_an_empty_profile_and_the_template_until_it_is_edited_are_the_default():
    assert parse_profile({}, "moegeom.toml") == DEFAULT
    assert tomllib.loads(profile_template()) == {}


def live(text: str) -> dict:
    """The lines of a part of the template when they count."""
    lines = [line[2:] for line in text.splitlines() if re.match(r"# (\[|[a-z_0-9]+ = )", line)]
    return tomllib.loads("\n".join(lines))


def test_every_line_of_the_template_is_the_default_when_it_counts():
    text = profile_template()
    profile = parse_profile(live(text[text.index("# [limits.") :]), "moegeom.toml")
    for check in CHECKS.all():
        for limit in check.limits:
            assert profile.limit(check.code, limit.name, 0, float("nan")) == limit.default


def test_the_examples_of_the_template_can_be_read():
    head = profile_template().partition("# Limits of the checks")[0]
    assert parse_profile(live(head), "moegeom.toml").thresholds


def test_moegeom_toml_comes_before_pyproject(tmp_path):
    assert find_profile(tmp_path) is None
    project = tmp_path / "pyproject.toml"
    for text in ("tool = 5", 'tool = "moegeom"', "[tool.other]\nx = 1\n"):
        project.write_text(text)
        assert find_profile(tmp_path) is None
        with pytest.raises(UsageError, match="has no table"):
            read_profile(project)
    project.write_text("tool.moegeom = 5")
    with pytest.raises(UsageError, match=r"pyproject.toml: it is 5, expected a table"):
        read_profile(project)
    project.write_text('[tool.moegeom]\nselect = ["MGI"]\n')
    assert find_profile(tmp_path) == project
    assert read_profile(project).select == ("MGI",)
    own = tmp_path / "moegeom.toml"
    own.write_text('select = ["MGN"]\n')
    assert find_profile(tmp_path) == own


def test_a_file_that_is_no_toml_or_hostile_is_an_error(tmp_path):
    file = tmp_path / "moegeom.toml"
    for content in (*(b"\xff\xfe", b"a = ", b"[" * 100_000, b"x = " + b"9" * 5000),):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"moegeom\.toml"):
            read_profile(file)
