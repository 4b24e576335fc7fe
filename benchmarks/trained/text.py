"""The text of the sample checkpoints: batches, held-out excerpts, and those excerpts attacked."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sample_ckpts.corpus import Domain, Excerpt, corpus_facts, draw_excerpts, load_corpus

if TYPE_CHECKING:
    from benchmarks.trained.settings import Settings

HELD_OUT_SEED = 3

#: The attack of S0 (C.1.1): a word becomes this token, with this probability.
TOKEN, RATE, ATTACK_SEED = b"AAA", 0.025, 4

WORD = re.compile(rb"[A-Za-z0-9]+")


@dataclass(frozen=True)
class HeldOut:
    """Excerpts [sequences, length] that the training does not contain, and the same attacked.

    ``attacked_share`` of the ``num_words`` words in the attacked excerpts were replaced.
    """

    tokens: Tensor
    attacked: Tensor
    attacked_share: float
    num_words: int


@cache
def corpus() -> tuple[Domain, ...]:
    """The four domains, read once."""
    return load_corpus()


def text_facts() -> dict[str, str]:
    """SHA-256 of the training text of each domain: results of other text are other results."""
    facts = corpus_facts(corpus())["domains"]
    return {name: domain["training"]["sha256"][:16] for name, domain in facts.items()}


def batches(settings: Settings, seed: int) -> Iterator[Tensor]:
    """Endless batches [sequences, length], as many sequences of each domain; the same by seed."""
    generator = torch.Generator().manual_seed(seed)
    texts = [_bytes(domain.training) for domain in corpus()]
    place = torch.arange(settings.length)
    size = (settings.sequences_per_domain, 1)
    while True:
        starts = [
            torch.randint(len(text) - settings.length + 1, size, generator=generator)
            for text in texts
        ]
        yield torch.cat(
            [text[start + place] for text, start in zip(texts, starts, strict=True)]
        ).long()


@cache
def held_out(length: int, per_domain: int) -> HeldOut:
    """Excerpts of every domain; both versions begin at the same byte and have ``length`` bytes.

    Excerpts are drawn twice as long, because an attack makes text shorter or longer.
    """
    excerpts = draw_excerpts(corpus(), length=2 * length, per_domain=per_domain, seed=HELD_OUT_SEED)
    source = random.Random(ATTACK_SEED)
    found = [_attacked(excerpt, length, source) for excerpt in excerpts]
    num_words = sum(words for _, _, words in found)
    return HeldOut(
        tokens=torch.stack([_bytes(excerpt.data[:length]) for excerpt in excerpts]).long(),
        attacked=torch.stack([_bytes(data) for data, _, _ in found]).long(),
        attacked_share=sum(hits for _, hits, _ in found) / num_words,
        num_words=num_words,
    )


def attack(data: bytes, source: random.Random) -> tuple[bytes, list[tuple[int, bool]]]:
    """The text with words replaced; where each word begins in it, and whether it was replaced."""
    pieces: list[bytes] = []
    words: list[tuple[int, bool]] = []
    at = written = 0
    for word in WORD.finditer(data):
        is_hit = source.random() < RATE
        pieces += [data[at : word.start()], TOKEN if is_hit else word[0]]
        written += len(pieces[-2])
        words.append((written, is_hit))
        written += len(pieces[-1])
        at = word.end()
    return b"".join([*pieces, data[at:]]), words


def _attacked(excerpt: Excerpt, length: int, source: random.Random) -> tuple[bytes, int, int]:
    """Attacked excerpt, and how many of its words were replaced."""
    data, words = attack(excerpt.data, source)
    if len(data) < length:
        raise RuntimeError(
            f"{excerpt.source}: {len(data)} bytes are left of {len(excerpt.data)} attacked ones, "
            f"{length} are wanted"
        )
    kept = [is_hit for start, is_hit in words if start < length]
    return data[:length], sum(kept), len(kept)


def _bytes(data: bytes) -> Tensor:
    """A token is a byte."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
