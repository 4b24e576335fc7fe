"""Noise between two recordings: planted sizes come back, other tokens are refused."""

from __future__ import annotations

import numpy as np
import pytest

from moegeom.core.errors import RecordingError
from moegeom.core.router import Norm
from moegeom.core.tokens import SourceFacts, TokenColumns
from moegeom.studies.boundary.recorded_noise import recorded_noise
from tests.unit.studies.test_balancing import HIDDEN, router_of

TOKENS, WIDTH = 4000, 32


class Arrays:
    """A recording in memory."""

    def __init__(self, stage: str, columns: TokenColumns, values: dict[str, np.ndarray]) -> None:
        self._columns, self._values = columns, values
        self.facts = SourceFacts(
            name="arrays",
            stage=stage,
            num_tokens=len(columns.document),
            routers=tuple(values),
            domains=(),
            has_documents=True,
            has_chosen=False,
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        return self._columns.at(slice(start, stop))

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        return self._values[router][start:stop]


def source(noise: float, seed: int, **changes) -> Arrays:
    """One run of the same 4000 tokens at two routers; the second has twice the noise."""
    truth, random = np.random.default_rng(0), np.random.default_rng(seed)
    values = {}
    for factor, router in ((1.0, "text/0"), (2.0, "text/1")):
        exact = 3.0 * truth.standard_normal((TOKENS, WIDTH))
        disturbed = exact + factor * noise * random.standard_normal(exact.shape)
        values[router] = disturbed.astype(np.float32)
    return made(values, **changes)


def made(values: dict[str, np.ndarray], stage: str = "router_input", first_id: int = 5) -> Arrays:
    count = len(next(iter(values.values())))
    token = np.arange(count)
    columns = TokenColumns(
        document=token // 50,
        position=(token % 50).astype(np.int32),
        token_id=np.where(token == 7, first_id, 1).astype(np.int32),
        domain=np.full(count, -1, np.int16),
    )
    return Arrays(stage, columns, values)


def test_planted_noise_comes_back_at_every_router() -> None:
    found = recorded_noise(source(0.03, 1), source(0.03, 2))
    assert set(found) == {"text/0", "text/1"}
    for router, planted in (("text/0", 0.03), ("text/1", 0.06)):
        noise = found[router]
        assert not noise.is_relative
        np.testing.assert_allclose(noise.scale, planted, rtol=0.01)
        np.testing.assert_allclose(noise.relative, planted / 3.0, rtol=0.02)
        assert noise.systematic_share < 0.01


def test_noise_recorded_before_the_norm_is_that_of_what_the_router_reads() -> None:
    gain = np.linspace(0.5, 4.0, HIDDEN)
    router = router_of(norm=Norm("rms", 1e-6, "norm"), gain=gain)
    random = np.random.default_rng(3)
    exact = 7.0 * random.standard_normal((TOKENS, HIDDEN))
    runs = [exact + 0.2 * random.standard_normal(exact.shape) for _ in range(2)]
    before = [made({"text/0": run.astype(np.float32)}, "pre_norm") for run in runs]
    rms = [np.sqrt((run**2).mean(axis=1, keepdims=True)) for run in runs]
    after = [
        made({"text/0": (run / size * gain).astype(np.float32)})
        for run, size in zip(runs, rms, strict=True)
    ]
    (found,), (expected,) = (recorded_noise(*pair, (router,)).values() for pair in (before, after))
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-4)
    assert abs(found.scale - 0.2) > 0.05


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"stage": "logits"}, "holds logits"),
        ({"first_id": 6}, "token 7 has another token id"),
        ({"stage": "pre_norm"}, "expected the same stage"),
    ],
)
def test_other_tokens_and_stages_are_refused(other: dict, said: str) -> None:
    with pytest.raises(RecordingError, match=said):
        recorded_noise(source(0.1, 1), source(0.1, 2, **other))


def test_another_number_of_tokens_or_another_width_is_refused() -> None:
    whole = {"text/0": np.ones((100, 8), np.float32)}
    with pytest.raises(RecordingError, match="100 tokens, .* 90"):
        recorded_noise(made(whole), made({"text/0": np.ones((90, 8), np.float32)}))
    with pytest.raises(RecordingError, match="8 values a token"):
        recorded_noise(made(whole), made({"text/0": np.ones((100, 9), np.float32)}))
    with pytest.raises(RecordingError, match="no router in common"):
        recorded_noise(made(whole), made({"text/3": np.ones((100, 8), np.float32)}))
