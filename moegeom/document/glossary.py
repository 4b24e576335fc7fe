"""What the words of reports mean: one sentence for each, shown where a page first says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

#: Word to sentence. What each column of a table holds is said by its metric: ``moegeom metrics``.
WORDS: Mapping[str, str] = {
    "95 % interval": "Where the figure would lie for other documents like these, in 95 of 100 "
    "cases.",
    "boundary distance": "Length of the smallest change of a router's input that changes its "
    "expert set.",
    "co-activation": "Two experts chosen for the same token.",
    "CV": "Standard deviation over mean, of the loads where nothing else is said: 0 where all are "
    "equal.",
    "dead": "An expert that no token chooses.",
    "effective rank": "How many directions the rows of a router span, counted by their weight.",
    "expert set": "The experts that a router chooses for a token, in any order.",
    "fair share": "The tokens that each expert would get if all got the same.",
    "fingerprint": "A hash of the routers' weights, by which a recording is known to belong to a "
    "checkpoint.",
    "flip": "Another expert set for the same token: under another arithmetic, in another run, or "
    "by another checkpoint.",
    "Gini": "Gini coefficient of the loads: 0 where all are equal, near 1 where one expert gets "
    "everything.",
    "Gram score": "1 less the rms cosine between the rows of a router: 1 where all are "
    "orthogonal, 0 where all point one way.",
    "heuristic": "A limit from experience: how often it is passed by chance is not known.",
    "load": "How many tokens choose an expert; over the mean, 1 is an even share.",
    "load entropy": "Entropy of the loads over that of even loads: 1 where all are equal.",
    "margin": "The selection score of the last expert chosen less that of the first one left out.",
    "MaxVio": "The largest load over the mean load, less 1: 0 where all are equal.",
    "mean resultant length": "Length of the mean of the router inputs, each of length 1: 1 where "
    "all point one way.",
    "near-tie": "A token so near to a boundary that rounding or noise can flip it.",
    "participation ratio": "How many directions the router inputs spread over, counted by their "
    "variance.",
    "provably unchanged": "No rounding that the arithmetic allows can flip these tokens, for the "
    "inputs that were recorded.",
    "random router": "A router of the same shape and row lengths, with random directions, on the "
    "same tokens: what chance alone gives.",
    "rms": "Root of the mean square.",
    "router input": "What a router multiplies with its rows: hidden states behind the norm.",
    "routing entropy": "Entropy of a token's scores over log(experts): 0 where one expert has all, "
    "1 where all are equal.",
    "routing weight": "What the output of a chosen expert is multiplied with.",
    "selection bias": "Added to the scores for the choice of experts only, not to their weights.",
    "selection score": "What experts are ranked by: the largest k are chosen.",
    "underused": "An expert with far fewer tokens than its fair share.",
}

#: Endings that a word may have in a sentence.
_ENDINGS = {"flip": "(?:s|ped|ping)?"}


@cache
def pattern() -> re.Pattern[str]:
    """Any of the words, the longest where several fit, as a sentence may say them."""
    longest = sorted(WORDS, key=lambda word: -len(word))
    said = (f"{re.escape(word)}{_ENDINGS.get(word, 's?')}" for word in longest)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(said)})(?![\w/-])", re.IGNORECASE)


@cache
def word_of(said: str) -> str:
    """The word of the glossary that :func:`pattern` found."""
    return max((word for word in WORDS if said.lower().startswith(word.lower())), key=len)
