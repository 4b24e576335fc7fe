"""Tokens that are not finite: refused with what leaves them out, and counted where they are."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

ON = ("--router-pattern", r"net\.(\d+)\.w", "--top-k", "2", "--score", "softmax")


@pytest.fixture
def place(tmp_path):
    drawn = np.random.default_rng(0)
    save_file({"net.0.w": drawn.standard_normal((8, 16), np.float32)}, tmp_path / "m.safetensors")
    tokens = drawn.standard_normal((200, 16), np.float32)
    tokens[3], tokens[7, 0] = np.nan, np.inf
    np.save(tmp_path / "some.npy", tokens)
    np.save(tmp_path / "none.npy", np.full_like(tokens, np.nan))
    return tmp_path


def scanned(moegeom, place, tokens):
    given = ("--tokens", tokens, "--stage", "router_input", "--non-finite", "skip", "--out", "out")
    ran = moegeom(place, "scan", "m.safetensors", *ON, *given, COLUMNS="120")
    assert ran.code == 0, ran.err
    return " ".join(ran.out.split())


def test_what_was_left_out_is_counted_on_screen_and_in_the_verdict_of_the_gate(moegeom, place):
    said = scanned(moegeom, place, "some.npy")
    assert "Not finite, so left out: 2" in said
    assert "load holds for these 198 tokens" in said
    verdict = " ".join(moegeom(place, "check", "out", COLUMNS="120").out.split())
    assert "Not checked: 2 of 200 tokens (not finite)" in verdict


def test_without_one_finite_token_nothing_is_said_to_hold(moegeom, place):
    said = scanned(moegeom, place, "none.npy")
    assert "Not one token is finite: nothing is known of load" in said
    assert "holds for" not in said
    assert "200 of 200 tokens (not finite)" in " ".join(moegeom(place, "check", "out").out.split())


def test_the_command_that_leaves_them_out_is_named_where_they_are_refused(moegeom, place):
    given = ("--tokens", "some.npy", "--stage", "router_input")
    for command in ("scan", "check", "boundary-report"):
        ran = moegeom(place, command, "m.safetensors", *ON, *given)
        assert ran.code not in (0, 1)
        assert "--non-finite skip of scan" in " ".join(ran.err.split()), command
