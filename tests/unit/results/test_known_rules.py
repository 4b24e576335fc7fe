"""A rule is verified once, and for good, for the routers it was verified with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, RouterSet, Rule, Weights
from moegeom.results.known_rules import recall_rule, remember_rule


def _routers(top_k: int = 2, fingerprint: str = "xxh128:ab") -> RouterSet:
    rule = Rule(top_k, "softmax", Weights("scores"))
    provenance = Provenance("olmoe", ("w",), "f", "F32")
    router = Router("text/0", "text", 0, np.eye(3, 4), rule, provenance)
    return RouterSet((router,), "m", "olmoe", "softmax", fingerprint)


def test_a_rule_is_recalled_for_the_same_routers_and_no_others(tmp_path: Path) -> None:
    remember_rule(tmp_path / "new", _routers(), "rec", 256, 1.0)
    found = recall_rule(tmp_path / "new", _routers())
    assert found is not None
    assert found.sentence == "verified before by recording rec (256 tokens)"
    assert recall_rule(tmp_path / "new", _routers(top_k=3)) is None
    assert recall_rule(tmp_path / "new", _routers(fingerprint="xxh128:cd")) is None


@pytest.mark.parametrize(("tokens", "share"), [(255, 1.0), (4096, 0.98)])
def test_too_little_evidence_is_not_remembered(tokens: int, share: float, tmp_path: Path) -> None:
    remember_rule(tmp_path, _routers(), "rec", tokens, share)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"rule": 1}', b"[" * 9000, b"\xff"])
def test_a_damaged_file_is_as_good_as_none(raw: bytes, tmp_path: Path) -> None:
    remember_rule(tmp_path, _routers(), "rec", 256, 1.0)
    (file,) = tmp_path.iterdir()
    file.write_bytes(raw)
    assert recall_rule(tmp_path, _routers()) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    remember_rule(tmp_path / "file", _routers(), "rec", 256, 1.0)
    assert recall_rule(tmp_path / "file", _routers()) is None


def test_verified_routers_differ_in_nothing_but_the_trust() -> None:
    found = _routers().verified("verified before by recording rec (256 tokens)")
    (router,) = found.routers
    assert router.provenance == dataclasses.replace(
        _routers().routers[0].provenance, trust="verified"
    )
    assert found.verified_by == "verified before by recording rec (256 tokens)"
