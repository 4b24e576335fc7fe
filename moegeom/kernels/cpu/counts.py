"""Sums and counts over tokens, keys of expert sets, and comparisons of two sets."""

from __future__ import annotations

import numpy as np

from moegeom.geometry.histogram import FIRST_CODE, NUM_BINS
from moegeom.geometry.keys import expert_codes, mix
from moegeom.kernels.cpu import kernel


# ------------------------------------------------------------------------------------------ experts
@kernel()
def _count_experts(counts, chosen, population, block):
    for token in range(chosen.shape[0]):
        for slot in range(chosen.shape[1]):
            expert = chosen[token, slot]
            if expert >= 0:
                counts[population[token], block[token], expert] += 1


def count_experts(
    counts: np.ndarray, chosen: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds 1 at (population, block, expert) for each chosen slot; -1 is an empty slot."""
    _count_experts(counts, chosen, population, block)


# -------------------------------------------------------------------------------------------- pairs
@kernel()
def _count_pairs(counts, chosen, block):
    for token in range(chosen.shape[0]):
        table = counts[block[token]]
        for slot in range(chosen.shape[1]):
            one = chosen[token, slot]
            if one < 0:
                continue
            table[one, one] += 1
            for other_slot in range(slot):
                other = chosen[token, other_slot]
                if other >= 0:
                    table[min(one, other), max(one, other)] += 1


def count_pairs(counts: np.ndarray, chosen: np.ndarray, block: np.ndarray) -> None:
    """Adds 1 at (block, i, j) for each two slots of a token with i <= j; -1 is an empty slot."""
    _count_pairs(counts, chosen, block)


# --------------------------------------------------------------------------------------------- sets
@kernel()
def _code_sums(chosen, codes, out):
    for token in range(chosen.shape[0]):
        total = np.uint64(0)
        for slot in range(chosen.shape[1]):
            if chosen[token, slot] >= 0:
                total += codes[chosen[token, slot]]
        out[token] = total


def expert_set_key(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Mixed sum, modulo 2^64, of the codes of the chosen experts."""
    out = np.empty(len(chosen), dtype=np.uint64)
    _code_sums(chosen, expert_codes(num_experts), out)
    return mix(out)


@kernel()
def _same(chosen, recorded, out):
    for token in range(chosen.shape[0]):
        same = True
        for slot in range(recorded.shape[1]):
            is_member = False
            for rank in range(chosen.shape[1]):
                if chosen[token, rank] == recorded[token, slot]:
                    is_member = True
            repeated = False
            for earlier in range(slot):
                if recorded[token, earlier] == recorded[token, slot]:
                    repeated = True
            same = same and is_member and not repeated
        out[token] = same


def same_set(chosen: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """True where both rows hold the same set of experts, in whatever order."""
    out = np.zeros(len(chosen), dtype=np.bool_)
    if chosen.shape[1] == recorded.shape[1]:
        _same(chosen, recorded, out)
    return out


@kernel()
def _count_shared(first, second, out):
    for token in range(first.shape[0]):
        shared = 0
        for slot in range(first.shape[1]):
            for other in range(second.shape[1]):
                if first[token, slot] == second[token, other] and first[token, slot] >= 0:
                    shared += 1
        out[token] = shared


def num_shared(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Size of the intersection of each two rows, whatever their order; -1 is an empty slot."""
    out = np.empty(len(first), dtype=np.int64)
    _count_shared(first, second, out)
    return out


# ------------------------------------------------------------------------------------------- values
@kernel()
def _count_bins(histogram, bits, population, block):
    for token in range(bits.shape[0]):
        index = (bits[token] >> 48) - FIRST_CODE + 1
        index = min(max(index, 0), NUM_BINS - 1)
        histogram[population[token], block[token], index] += 1


def count_bins(
    histogram: np.ndarray, values: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds 1 at (population, block, bin of the value)."""
    # adding 0.0 turns -0.0, whose bits are odd, into 0.0
    _count_bins(histogram, (values + 0.0).view(np.int64), population, block)


@kernel()
def _add_scores(sums, probability, population, block):
    for token in range(probability.shape[0]):
        row = sums[population[token], block[token]]
        for expert in range(probability.shape[1]):
            row[expert] += np.int64(np.rint(np.float64(probability[token, expert]) * 2.0**36))


def add_scores(
    sums: np.ndarray, probability: np.ndarray, population: np.ndarray, block: np.ndarray
) -> None:
    """Adds each probability, rounded to a whole number of 2^-36, at (population, block, expert)."""
    _add_scores(sums, probability, population, block)
