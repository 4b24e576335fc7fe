"""How much to hold and to do at once, and which tokens a sample takes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from moegeom.core.digest import sha256_of
from moegeom.core.shapes import Int64
from moegeom.core.tokens import TILE

T = TypeVar("T")
S = TypeVar("S")

#: Bytes of recorded values that one worker holds. Large enough to hide the cost of a call, small
#: enough that two workers and the page cache share a laptop.
BATCH_BYTES = 32 * 2**20

#: Tiles in a batch at most, so that the sums of a batch stay exact in float64.
MAX_TILES = 16

#: Tokens of quantities that need a second pass, such as the random router.
SAMPLE_TOKENS = 20_000

#: Rounds of drawing by lot at most: more than any stream has.
_MOST_ROUNDS = 48

#: Tokens of the sample that is enough for what costs as much as the product, or more.
SMALL_SAMPLE_TOKENS = 4096


def batch_tokens(width: int, batch_bytes: int = BATCH_BYTES) -> int:
    """Tokens per batch: whole tiles, between one tile and 16 of them."""
    tiles = batch_bytes // (4 * max(width, 1) * TILE)
    return TILE * int(min(max(tiles, 1), MAX_TILES))


def num_workers() -> int:
    """Worker threads: the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _libraries(num_modules: int) -> ThreadpoolController:
    """Thread pools of libraries, while no module more is loaded that could bring another."""
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """While it lasts BLAS keeps to one thread, the arithmetic of a scan.

    Looking for libraries takes 20 ms of a process with torch: more than many a product here.
    """
    return _libraries(len(sys.modules)).limit(limits=1, user_api="blas")


def on_all_cores(
    work: Callable[[S], T], items: Iterable[S], num_threads: int | None = None
) -> Generator[T, None, None]:
    """Results in the order of the items, on as many threads as there are cores unless said.

    Each has one thread of BLAS, the arithmetic of a scan: the answer does not depend on how many
    work. Where one fails, or nobody wants more of them, what has not begun is left out.
    """
    # no queue of a few at a time: the others go on while a long one runs
    with (
        one_blas_thread(),
        ThreadPoolExecutor(num_threads or num_workers(), "moegeom-cores") as pool,
    ):
        yield from pool.map(work, items)


def sample_tiles(num_tokens: int, seed: int, most: int = SAMPLE_TOKENS) -> list[int]:
    """Numbers of the tiles of a sample of at most ``most`` tokens, chosen by a hash; ascending.

    All tiles when the stream is no longer than that. The choice depends on the seed and on the
    number of tokens alone.
    """
    tiles = -(-num_tokens // TILE)
    if num_tokens <= most:
        return list(range(tiles))
    generator = np.random.Generator(np.random.PCG64([seed, num_tokens]))
    # the last tile may be short: leaving it out keeps every sampled tile whole
    return np.sort(generator.choice(tiles - 1, most // TILE, replace=False)).tolist()


def by_tile(
    token: Int64[np.ndarray, "tokens"], size: int = TILE
) -> Iterator[tuple[int, Int64[np.ndarray, "rows"]]]:
    """Each run of ``size`` numbers, from a multiple of it on, that holds some of the ascending
    tokens: where it starts, and the rows of those that lie in it.
    """
    edges = np.flatnonzero(np.diff(token // size)) + 1
    for rows in np.split(np.arange(len(token)), edges) if len(token) else ():
        yield int(token[rows[0]]) // size * size, rows


def rounds_won(tile: int, seed: int) -> int:
    """How many rounds a tile survives in which one of two neighbours is drawn by lot.

    Of the tiles ``m 2^h`` to ``(m + 1) 2^h - 1`` one has won ``h`` rounds or more, so that a stream
    whose length nobody knows is thinned by halves, evenly, and each tile decides by itself.
    """
    for won in range(_MOST_ROUNDS):
        pair, side = divmod(tile >> won, 2)
        if sha256_of(seed, won, pair).digest()[0] & 1 != side:
            return won
    return _MOST_ROUNDS


def sample_batches(num_tokens: int, seed: int, most: int, batch: int) -> list[int]:
    """Tiles of a sample of whole batches: those of ``sample_tiles`` where a tile holds a batch."""
    tiles = max(batch // TILE, 1)
    last = -(-num_tokens // TILE)
    chosen = sample_tiles(-(-num_tokens // tiles), seed, max(most // tiles, TILE))
    return [t for group in chosen for t in range(group * tiles, min((group + 1) * tiles, last))]
