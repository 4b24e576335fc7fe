"""A synthetic prior for questions of geometry: directions without preference, norms as after RMS.

It answers nothing about load or entropy, and it is named in every row that it produces.
"""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import Float32

from moegeom.core.errors import InternalError, RecordingError
from moegeom.core.registry import unknown_name
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits
from moegeom.tokens.ranges import check_range
from moegeom.tokens.recording.columns import unknown_columns
from moegeom.tokens.recording.outputs import check_output_kind

#: Tokens drawn together. Not ``TILE``: the numbers must not change when the scan is tuned.
BLOCK = 256


class IsotropicRmsPrior:
    r"""Router inputs ``y = gain * u``, with u uniform on the sphere of radius ``sqrt(hidden)``.

    This is what an RMS norm gives when every direction of the residual stream is equally likely.

    Parameters
    ----------
    routers
        (name, gain of the norm in front or None, hidden size) of each router.
    seed
        Equal seeds give equal numbers. Each block of 256 tokens of each router has a counter-based
        stream of its own, so every range of tokens has the same bits however it is cut, and
        neither the other routers nor ``num_tokens`` matter.
    """

    name = "isotropic-rms"

    def __init__(
        self,
        routers: tuple[tuple[str, Float32[np.ndarray, "hidden"] | None, int], ...],
        num_tokens: int,
        seed: int,
    ) -> None:
        self._gains = {name: gain for name, gain, _ in routers}
        self._hidden = {name: hidden for name, _, hidden in routers}
        self._keys = {name: _philox_key(seed, name) for name in self._hidden}
        for name, gain in self._gains.items():
            if gain is not None and gain.shape != (self._hidden[name],):
                raise InternalError(
                    f"{name}: gain has shape {gain.shape}; expected ({self._hidden[name]},)."
                )
        self._facts = SourceFacts(
            name=f"prior {self.name}, seed {seed}",
            stage="router_input",
            num_tokens=num_tokens,
            routers=tuple(self._hidden),
            domains=(),
            has_documents=False,
            has_chosen=False,
            is_synthetic=True,
        )

    @property
    def facts(self) -> SourceFacts:
        return self._facts

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        check_range(self._facts, start, stop)
        return unknown_columns(stop - start)

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens width"]:
        if router not in self._hidden:
            error = unknown_name("router in the prior", router, self._hidden)
            raise RecordingError(error.message, error.hint)
        check_range(self._facts, start, stop)
        out = np.empty((stop - start, self._hidden[router]), np.float32)
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            rows = self._block(router, block)
            out[first - start : last - start] = rows[first - block * BLOCK : last - block * BLOCK]
        return out

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise RecordingError(
            f"{self._facts.name}: top logits of {router}, tokens [{start}, {stop}), were asked "
            "for; a prior has router inputs only."
        )

    def read_chosen(self, router: str, start: int, stop: int) -> None:
        """None: nobody chose."""
        del router, start, stop

    def read_output(self, router: str, kind: str, start: int, stop: int) -> None:
        """None: no expert ran."""
        del router, start, stop
        check_output_kind(kind)

    def _block(self, router: str, block: int) -> Float32[np.ndarray, "block hidden"]:
        hidden, gain = self._hidden[router], self._gains[router]
        # The block is the second word of the counter: 2^64 draws lie between two blocks.
        stream = np.random.Philox(key=self._keys[router], counter=[0, block, 0, 0])
        rows = np.random.Generator(stream).standard_normal((BLOCK, hidden), dtype=np.float32)
        squares = np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True)
        rows *= np.sqrt(hidden / squares).astype(np.float32)
        return rows if gain is None else rows * gain.astype(np.float32)


def _philox_key(seed: int, router: str) -> np.ndarray:
    """128 bits from seed and router name, the same on every machine and Python."""
    digest = hashlib.sha256(f"{seed}:{router}".encode()).digest()
    return np.frombuffer(digest[:16], "<u8").astype(np.uint64)
