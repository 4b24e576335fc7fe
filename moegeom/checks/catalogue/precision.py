"""Digits of routers: in the file, in the values, and after an engine has quantised them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moegeom.checks.baseline import BaselineRouter
from moegeom.checks.check import Limit, Limits, Unknown, check, without_saying
from moegeom.checks.measured import Measured, Row
from moegeom.core.finding import Finding
from moegeom.core.text import listed, number_of

_STORED_PARTS = (("weight", "weight", "stored_dtype"), ("bias", "selection bias", "bias_dtype"))


@check(
    "MGN117",
    "a router is stored more coarsely than its family keeps it",
    "warning",
    ("weight_bits_kept",),
    concerns=without_saying,
    absent="nothing is known of how the family stores its routers",
    severities={"release": "error"},
)
def stored_too_coarsely(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Routers are stored as precisely as their family stores them.

    Looked for: fewer mantissa bits in the stored weight or selection bias than the family's own
    checkpoints have.

    A finding means: a conversion or a quantiser rounded the router. It is the smallest part of the
    model and the one whose rounding changes which experts run.

    What to do: take the routers from the original; put them on the list of modules to skip.
    """
    for row in measured.layers:
        for column, what, dtype in _STORED_PARTS:
            bits, family_bits = row.get(f"{column}_bits"), row.get(f"{column}_bits_kept")
            if bits is not None and family_bits is not None and bits < family_bits:
                yield stored_too_coarsely.finding(
                    row["router"],
                    f"the {what} is stored with {bits} mantissa bits; its family keeps "
                    f"{family_bits}.",
                    f"Stored as {measured.facts(row['router']).get(dtype, '?').lower()}. What was "
                    "rounded away cannot be had back from this file.",
                )


_BF16_BITS = 7

#: Different values are counted in windows of so many.
_WINDOW = 32


def _has_windows(measured: Measured, row: Row) -> bool:
    """Whether rows are plain floats, and as long as a window."""
    is_plain = row.get("weight_bits") is not None
    return is_plain and measured.facts(row["router"]).get("hidden_size", 0) >= _WINDOW


@check(
    "MGN118",
    "a router was rounded before it was stored",
    "warning",
    ("levels_share",),
    limits=(
        Limit("share", 0.965, "least different values in windows of 32, over Gaussian rows"),
        Limit("row_share", 0.7, "the same for a single row"),
    ),
    absent="rows are shorter than a window of 32",
    concerns=_has_windows,
    severities={"release": "error"},
)
def quantised_before(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """The values of a router use the precision they are stored in.

    Looked for: the number of different values in windows of 32 weights, beside that of Gaussian
    rows in the stored dtype; and float32 storage that holds bfloat16 numbers only, unless the file
    is a GGUF, which stores routers in float32, or the baseline held such numbers too.

    A finding means: the router was rounded before it was stored, to integers or short floats by a
    quantiser, or to bfloat16 by a transfer, and written back in a longer format.

    What to do: take the routers from the original. Behind a transfer between trainer and engine,
    send routers in float32.
    """
    for row in sorted(measured.layers, key=lambda row: row.get("levels_share") or 1.0):
        router, share = row["router"], row.get("levels_share")
        if _is_padded_bf16(row) and not _may_be_padded(measured, router):
            stored = measured.facts(router).get("stored_dtype", "?").lower()
            yield quantised_before.finding(
                router,
                f"stored as {stored}, and every value is a bfloat16 number.",
                "The router went through bfloat16 on its way here.",
            )
            continue
        if share is None:
            continue
        least = limits("row_share", router)
        experts = measured.experts[router]
        coarse = [e["expert"] for e in experts if (e.get("row_levels_share") or 1.0) < least]
        if share < limits("share", router) or coarse:
            who = f"expert {listed(coarse)}" if coarse else "the rows on average"
            yield quantised_before.finding(
                router,
                f"the rows hold {100 * share:.0f} % of the different values that their dtype "
                "would.",
                f"Too few: {who}. Rounded to a coarser format before they were stored.",
            )


def _may_be_padded(measured: Measured, router: str) -> bool:
    """Whether nothing was lost: GGUF stores routers in float32, whatever they were trained in, and
    the baseline may have held bfloat16 numbers as well.
    """
    before = measured.before(router)
    was = None if before is None else before.columns.get("is_weight_bf16")
    is_gguf = str(measured.facts(router).get("file", "")).endswith(".gguf")
    return is_gguf or (was is not None and was[0] == 1.0)


def _is_padded_bf16(row: Row) -> bool:
    """float32 that holds bfloat16 numbers, in a family that does not keep bfloat16 anyway."""
    bits, family_bits = row.get("weight_bits"), row.get("weight_bits_kept")
    return bool(
        bits
        and bits > _BF16_BITS
        and row["is_weight_bf16"]
        and (family_bits is None or family_bits > _BF16_BITS)
    )


#: Different values in windows of 32, over those of Gaussian rows: more than this is no chance.
_LEVELS_LOST = 0.03

_COMPARED_PARTS = {"weight_bits": "weight", "bias_bits": "selection bias"}


@check(
    "MGN125",
    "a router is stored more coarsely than it was",
    "warning",
    ("weight_bits",),
    concerns=without_saying,
    inputs="baseline",
    severities={"release": "error"},
)
def precision_lost(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Routers are stored as precisely as in the baseline.

    Looked for: fewer mantissa bits in the stored weight or selection bias than the baseline has,
    weights that hold bfloat16 numbers only where the baseline's did not, and fewer different values
    in windows of 32 weights than the baseline held in the same dtype.

    A finding means: a conversion rounded the router since the baseline was made. Fewer values in
    the same dtype are an error: a router was quantised and written back.

    What to do: convert again with the routers, and their selection bias, on the list of modules to
    keep.
    """
    for row in measured.layers:
        before = measured.before(row["router"])
        was = None if before is None else before.columns.get("is_weight_bf16")
        # storage that was used in full and holds bfloat16 numbers only
        if was is not None and was[0] == 0.0 and row.get("is_weight_bf16"):
            yield precision_lost.finding(
                row["router"],
                "every value of the weight is a bfloat16 number; in the baseline it was not.",
                "The router went through bfloat16 since: a transfer, or a conversion.",
            )
        if lost := lost_levels(before, row):
            yield replace(
                precision_lost.finding(
                    row["router"],
                    f"the rows lost {100 * lost:.0f} % of the different values that they held.",
                    "They are stored as before and were quantised in between, to integers or short "
                    "floats.",
                ),
                severity="error",
            )
        for column, what in _COMPARED_PARTS.items():
            old = None if before is None else before.columns.get(column)
            if old is not None and row.get(column) is not None and row[column] < old[0]:
                yield precision_lost.finding(
                    row["router"],
                    f"the {what} is stored with {row[column]} mantissa bits; the baseline has "
                    f"{old[0]:.0f}.",
                    "What was rounded away cannot be had back from this file.",
                )


def lost_levels(before: BaselineRouter | None, row: Row) -> float | None:
    """How many of the different values that the baseline held are gone, as a share; None unless
    it is more than chance, and in the same dtype.
    """
    was = None if before is None else before.columns.get("levels_share")
    bits = None if before is None else before.columns.get("weight_bits")
    now = row.get("levels_share")
    if was is None or now is None or bits is None or row.get("weight_bits") != bits[0]:
        return None
    lost = was[0] - now
    return lost if lost > _LEVELS_LOST else None


@check(
    "MGN119",
    "the quantization_config covers routers that are stored plain",
    "warning",
    facts="quantisation",
    absent="the config asks for no quantisation",
    severities={"release": "error"},
)
def quantisation_covers_routers(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """The quantization_config leaves routers out.

    Looked for: routers that are stored plain, in a checkpoint whose ``quantization_config`` (or
    ``compression_config``, ``hf_quant_config.json`` and its kin) covers all linear modules, and
    whose list of exceptions names none of them, by name, glob or regular expression. A router whose
    module holds a further parameter, as the selection bias of DeepSeek-V3, is no linear module:
    only its own name covers it. And the reverse, an error: routers that are stored quantised, and
    that it leaves out.

    A finding means: an engine whose router is such a linear module asks for scales that are not
    there, or rounds the router while it loads. Engines that never quantise routers of this family
    are not concerned, so this is a warning. A quantised router that is left out is loaded as it
    stands, without its scales. Where a pattern is broken, or could take for ever to try, nothing is
    known of the routers that no other entry names.

    What to do: add the routers to the list that the finding names (such as ``re:.*mlp.gate$``), or
    accept the code in a profile with the engine that is used as the reason.
    """
    quantisation = measured.run["quantisation"]
    plain = [one for one in quantisation["plain"] if one["router"] in measured.experts]
    for one in plain:
        if one.get("is_unknown"):
            pattern = f"a pattern of '{quantisation['key']}' is broken, or dear to try"
            yield Unknown(one["router"], pattern)
    packed = [one for one in quantisation.get("packed", ()) if one["is_left_out"]]
    if packed:
        count = number_of(len(packed), "router is stored", "routers are stored")
        finding = quantisation_covers_routers.finding(
            tuple(one["router"] for one in packed),
            f"{count} as {packed[0]['scheme']}, and a table of the quantisation leaves them out.",
            f"Engines load '{packed[0]['module']}' as it stands, without its scales.",
        )
        yield replace(finding, severity="error")
    covered = [one for one in plain if one["is_covered"]]
    if covered:
        is_named = quantisation.get("by_path", False)
        what = "names them by path" if is_named else "does not leave them out"
        module = covered[0]["module"]
        finding = quantisation_covers_routers.finding(
            tuple(one["router"] for one in covered),
            f"{len(covered)} of {len(plain)} routers are stored plain, and "
            f"'{quantisation['key']}' {what}.",
            f"Loaders of {quantisation['method'].strip(chr(39))} build a quantised layer at "
            f"'{module}' and ask for its scales. Take the paths out."
            if is_named
            else f"The quantisation ({quantisation['method']}) covers linear modules, "
            f"'{module}' among them, unless they are listed.",
        )
        yield replace(finding, severity="error") if is_named else finding
