"""Small damage to the bytes of a file, the same for the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def rounds(counts: Mapping[Any, tuple[int, int]]) -> list[Any]:
    """What is mutated how often: the first number in every run, the second at night.

    At night, all fuzz tests together try 20 000 mutations.
    """
    always = [(what, count) for what, (count, _) in counts.items()]
    night = pytest.mark.nightly
    return always + [pytest.param(what, most, marks=night) for what, (_, most) in counts.items()]


def mutate(raw: bytes, draw: random.Random, words: Sequence[bytes], spans: Sequence[int]) -> bytes:
    """One to four edits: a flipped byte, a deleted span, a doubled span, a nasty word.

    Each replaces as many bytes as one of ``spans`` says.
    """
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        span = draw.choice(spans)
        edits: list[Callable[[], bytes]] = [
            lambda: bytes([draw.randrange(256)]),
            lambda: b"",
            lambda at=at, span=span: bytes(data[at : at + span]) * 2,
            lambda: draw.choice(words),
        ]
        data[at : at + span] = draw.choice(edits)()
    return bytes(data)
