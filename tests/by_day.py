"""What runs by day and what waits for the night: said where cases are listed, so that none is built to be left out.

``make test`` runs by day, ``make test-all`` at night. By day a cross runs one case of each mechanism.
"""

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Case = TypeVar("Case")

#: Is everything run?
IS_NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

#: Lists of which cases were left for the night, and how many each.
left_for_the_night: list[int] = []


def by_day(cases: Iterable[Case], day: Mapping[str, Case] | Collection[Case]) -> list[Case]:
    """All cases at night; by day those of ``day``: a table mechanism -> case, or a few that say all."""
    every = list(cases)
    chosen = list(day.values() if isinstance(day, Mapping) else day)
    missing = [case for case in chosen if case not in every]
    if missing or not chosen:
        raise LookupError(f"by day: {missing or 'nothing'} of {len(every)} cases")
    if IS_NIGHT:
        return every
    left_for_the_night.append(len(every) - len(chosen))
    return [case for case in every if case in chosen]


def one_of_each(cases: Iterable[Case], mechanism: Callable[[Case], Hashable]) -> list[Case]:
    """The first case of each mechanism by day: the table of a list that grows by itself."""
    every = list(cases)
    first: dict[Any, Case] = {}
    for case in every:
        first.setdefault(mechanism(case), case)
    return by_day(every, list(first.values()))
