"""Words of others, numbers of things, and ranges in sentences of ours."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from reprlib import Repr
from typing import SupportsInt

#: Characters of what a file gives that a message shows.
MOST_QUOTED = 200

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_QUOTED
_SHORT.maxlist = _SHORT.maxtuple = 12


def quoted(original: object, most: int = MOST_QUOTED) -> str:
    """A value as Python writes it, in at most ``most`` characters; long texts lose their middle."""
    text = _SHORT.repr(original)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def spelled(text: str) -> str:
    r"""The text as files can hold it: bytes of a name that are no UTF-8 become ``\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()


def number_of(count: SupportsInt, one: str, many: str = "") -> str:
    """``1 row`` or ``2,048 rows``; ``many`` where it is not ``one`` with an s: ``rows are``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def natural(name: str) -> list[tuple[str, int]]:
    """The key that sorts ``step10`` behind ``step9``."""
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d{0,18})", name)]


def listing(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def all_of(count: SupportsInt, one: str, many: str = "") -> str:
    """``the row`` or ``all 2,048 rows``; ``many`` as in `number_of`."""
    return f"the {one}" if count == 1 else f"all {number_of(count, one, many)}"


def these(count: SupportsInt, one: str, many: str = "") -> str:
    """``this row`` or ``these 2,048 rows``; ``many`` as in `number_of`."""
    return f"this {one}" if count == 1 else f"these {number_of(count, one, many)}"


def listed(values: Sequence[object], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    rest = len(values) - most
    return ", ".join(map(str, values[:most])) + (f" and {rest} more" if rest > 0 else "")


# ------------------------------------------------------------------------------------------- shares
def percent(share: float, spec: str = "") -> str:
    """``12 %``: two figures, and all that stand before the point; or written as ``spec`` says."""
    value = 100.0 * share
    return f"{value:{spec or ('.0f' if abs(value) >= 10.0 else '.2g')}} %"


def small_percent(share: float | None) -> str:
    """``0.03 %``: as `percent`, down to a hundred-thousandth; ``0 %`` only where there is none,
    ``-`` where it is not known.
    """
    if share is None:
        return "-"
    if share == 0.0:
        return "0 %"
    return "<.001 %" if share < 1e-5 else percent(share)


def percent_of_all(share: float, places: int = 2) -> str:
    """``99.98 %``: rounded down, so that 100 % means all of them."""
    scale = 10**places
    return f"{math.floor(100 * scale * share) / scale:.4g} %"


# ------------------------------------------------------------------------------------------- ranges
#: Level of every range that is printed.
LEVEL = 0.95


def range_text(
    value: float, error: float, num_blocks: int | None, digits: int, least: float = 0.0
) -> str:
    """``0.21-0.34``: the 95 % range of a figure that is not below ``least``."""
    half = half_width(error, num_blocks)
    return f"{max(least, value - half):.{digits}f}-{value + half:.{digits}f}"


def half_width(error: float, num_blocks: int | None) -> float:
    """Half the width of the 95 % range, t x error, t Student's quantile for blocks - 1.

    With 16 blocks t is 2.13: the factor 1.96 of many blocks would hold in 93 of 100 cases only. It
    is used where the number of blocks is not known. Oracle in tests: scipy.stats.t.
    """
    from scipy.special import stdtrit

    freedom = (num_blocks or 0) - 1
    probability = 0.5 + LEVEL / 2.0
    return error * float(stdtrit(freedom if freedom > 0 else 1e9, probability))


def figure_text(value: float) -> str:
    """A value beside a figure: three digits that count, thousands in groups."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
