"""Changes of a checkpoint that are proved to change no choice, in words and with the proof."""

from __future__ import annotations

import re

from moegeom.checks.measured import Measured, Row
from moegeom.core.text import number_of


def recentre(measured: Measured, row: Row) -> str:
    """Subtracting one number from all biases of a layer; empty where it would not help.

    Every comparison of the rule is between sums of equally many selection scores, expert against
    expert or group against group, so a common shift cancels. A group mask that fills with 0.0
    compares shifted scores with an unshifted 0: there it is not neutral, and that is said.
    """
    after, now = row["bias_num_distinct_bf16_recentred"], row["bias_num_distinct_bf16"]
    if after <= now:
        return ""
    fill = measured.facts(row["router"]).get("group_fill")
    if fill is not None and fill != "-inf":
        return (
            f"not by recentring: masked groups are filled with {fill}, which a shifted score would "
            "be compared with. "
        )
    groups = ", masked groups are -inf" if fill is not None else ""
    return (
        f"subtract {row['bias_middle']:.6g} from every bias of the layer: "
        f"{number_of(after, 'value survives', 'values survive')}. "
        "Proof that no choice changes: scores are compared with scores, sums of two with sums of "
        f"two{groups}; a common shift cancels. "
    )


def keep_in_float32(measured: Measured, row: Row) -> str:
    """The list of tensors that engines must not cast, as one pattern."""
    tensor = measured.facts(row["router"]).get("bias_tensor")
    if not tensor:
        return ""
    return f"keep in float32: {re.sub(r'[0-9]+', '*', tensor, count=1)}"


def either(first: str, second: str) -> str:
    """Both fixes, the second as another way; one alone as it is."""
    return " Another way: ".join(text.strip() for text in (first, second) if text)
