"""What a table of experts by token id holds."""

from __future__ import annotations

from dataclasses import dataclass

#: Whole numbers up to here are numbers of bfloat16; of larger ones only the even ones are.
EXACT_IN_BFLOAT16 = 256

#: Ids beyond that are enough to tell: of healthy ones about every second is odd.
_ENOUGH = 64


@dataclass(frozen=True)
class TokenTable:
    """What a table of (tokens, experts a token) holds; ``reason`` says why it was not read.

    ``num_outside`` entries are no expert of the layer, ``num_repeated`` rows name an expert twice,
    ``num_used`` experts are named at all. ``num_large`` entries are above 256, ``num_large_odd`` of
    them odd.
    """

    router: str
    tensor: str
    dtype: str
    num_tokens: int = 0
    top_k: int = 0
    num_experts: int = 0
    largest: float = 0.0
    num_outside: int = 0
    num_repeated: int = 0
    num_used: int = 0
    num_large: int = 0
    num_large_odd: int = 0
    reason: str = ""

    @property
    def is_rounded(self) -> bool:
        """Whether its ids went through bfloat16: many above 256, and not one of them is odd."""
        return self.num_large >= _ENOUGH and self.num_large_odd == 0
