"""The JUnit report holds to a schema, and a third party's reader counts what the verdict counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import xmlschema
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped

from moegeom.core.finding import Outcome, Verdict
from moegeom.document.model import View
from moegeom.document.render import render
from moegeom.studies.check.document import document
from moegeom.studies.check.record import Gate

SCHEMA = xmlschema.XMLSchema(Path(__file__).parents[2] / "data/junit.xsd")


def rendered(verdict, run) -> str:
    text = render(document(Gate(verdict, run), View()), "junit")
    SCHEMA.validate(text)
    return text


def read(verdict, run):
    """What junitparser makes of it: test cases by code."""
    xml = JUnitXml.fromstring(rendered(verdict, run).encode("utf-8"))
    return {case.name.split()[0]: case for suite in xml for case in suite}


@pytest.mark.parametrize("name", ["failed", "warned", "strict"])
def test_a_third_party_counts_what_the_verdict_counts(request, run, name):
    verdict = request.getfixturevalue(name)
    cases = read(verdict, run)
    kinds = [type(result) for case in cases.values() for result in case.result]
    assert len(cases) == len(verdict.outcomes)
    assert kinds.count(Failure) == sum(verdict.fails(outcome) for outcome in verdict.outcomes)
    assert kinds.count(Error) == len(verdict.in_state("inconclusive"))
    skipped = ("needs tokens", "needs a baseline", "does not apply", "ignored")
    assert kinds.count(Skipped) == sum(len(verdict.in_state(state)) for state in skipped)


@pytest.mark.parametrize("name", ["failed", "warned", "strict"])
def test_the_counters_of_suites_are_those_of_their_test_cases(request, run, name):
    xml = JUnitXml.fromstring(rendered(request.getfixturevalue(name), run).encode("utf-8"))

    def stated(part):
        return part.tests, part.failures, part.errors, part.skipped

    def counted(part):
        part.update_statistics()
        return stated(part)

    before = [stated(part) for part in (xml, *xml)]
    assert before == [counted(part) for part in (xml, *xml)]


def test_each_area_of_codes_is_a_suite(failed, run):
    cases = read(failed, run)
    areas = {code[:3]: case.classname for code, case in cases.items()}
    assert areas == {
        "MGI": "moegeom.integrity",
        "MGN": "moegeom.numerics",
        "MGG": "moegeom.geometry",
        "MGB": "moegeom.balance",
        "MGP": "moegeom.profile",
    }
    assert cases["MGI104"].name == "MGI104 two experts share a router row"


def test_a_code_of_no_known_area_is_still_reported(run):
    new = Outcome("MGX1", "of a later version", "error", "passed")
    assert read(Verdict((new,)), run)["MGX1"].classname == "moegeom.other"


def test_a_check_that_fails_the_gate_is_a_failure_with_its_findings(failed, run):
    (failure,) = read(failed, run)["MGI104"].result
    assert (type(failure), failure.type) == (Failure, "error")
    assert failure.message == "layer 44: experts 12 and 97 are the same row."
    assert "Bit-identical" in failure.text
    assert "next: moegeom routers" in failure.text


def test_a_warning_passes_with_its_text_until_warnings_fail(warned, strict, run):
    passing = read(warned, run)["MGN112"]
    assert passing.is_passed
    assert "layers 3-60: the selection bias does not survive" in passing.system_out
    (failure,) = read(strict, run)["MGN112"].result
    assert (type(failure), failure.type) == (Failure, "warning")


def test_an_inconclusive_check_is_an_error_of_its_own_type(failed, run):
    (error,) = read(failed, run)["MGN401"].result
    assert (type(error), error.type) == (Error, "inconclusive")
    assert error.message == "inconclusive: other version"


def test_a_check_that_was_not_judged_is_skipped_with_the_reason(failed, run):
    cases = read(failed, run)
    reasons = {code: cases[code].result[0].message for code in ("MGB203", "MGI121", "MGP901")}
    assert reasons == {
        "MGB203": "needs tokens: none",
        "MGI121": "needs a baseline: no baseline",
        "MGP901": "does not apply: the profile has none",
    }


def test_an_ignored_check_is_skipped_and_keeps_its_findings(failed, run):
    case = read(failed, run)["MGG203"]
    assert case.result[0].message == "ignored: known since step 900"
    assert "layer 9: rows far from the median length." in case.system_out


def test_several_findings_make_one_failure(run, of_others):
    verdict, _ = of_others("x")
    (failure,) = read(verdict, run)["MGI105"].result
    assert failure.message == "layer 1: x (and 1 more)"
    assert failure.text.count("layer 1: x") == 2


def test_routers_that_cannot_be_read_make_a_report_too(failed, refused_run):
    assert len(read(failed, refused_run)) == len(failed.outcomes)


def test_text_that_xml_forbids_does_not_break_the_document(of_others, hostile):
    text = rendered(*of_others(hostile))
    assert "<script" not in text
    assert "\\x1b[31m" in text
    (failure,) = read(*of_others(hostile))["MGI105"].result
    assert "]]>" in failure.text
    assert "<script>alert(1)</script>" in failure.text


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_any_text_makes_a_valid_document_that_a_file_can_hold(of_others, text):
    rendered(*of_others(text)).encode("utf-8")
