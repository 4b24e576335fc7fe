"""Tokens that are not finite: refused with what leaves them out, and counted where they are."""

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


def typed(command: str, tokens: str) -> tuple[str, ...]:
    return (command, "m.safetensors", *ON, "--tokens", tokens, "--stage", "router_input")


def test_what_was_left_out_is_counted_on_screen_and_in_the_verdict_of_the_gate(moegeom, place):
    skip = ("--non-finite", "skip", "--out")
    screen = moegeom(place, *typed("scan", "some.npy"), *skip, "some", COLUMNS="120", code=0).words
    assert "Not finite, so left out: 2" in screen
    assert "load holds for these 198 tokens" in screen
    verdict = moegeom(place, "check", "some", COLUMNS="120").words
    assert "Not checked: 2 of 200 tokens (not finite)" in verdict
    screen = moegeom(place, *typed("scan", "none.npy"), *skip, "none", COLUMNS="120", code=0).words
    assert "Not one token is finite: nothing is known of load" in screen
    assert "holds for" not in screen
    assert "200 of 200 tokens (not finite)" in moegeom(place, "check", "none").words
