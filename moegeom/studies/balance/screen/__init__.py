"""Which bias would balance each router: the record, and its reporters by file name."""

from moegeom.studies.balance.screen._balance import (
    BALANCE_REPORTERS,
    SENTENCES,
    Balance,
    HeldOut,
    Loads,
    Meaning,
    RouterBalance,
)

__all__ = [
    "BALANCE_REPORTERS",
    "SENTENCES",
    "Balance",
    "HeldOut",
    "Loads",
    "Meaning",
    "RouterBalance",
]
