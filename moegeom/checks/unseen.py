"""What of a checkpoint was not looked at: routers, choices, tokens, and hashes of experts."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.checks.measured import Measured, knows_config
from moegeom.core.text import listing, number_of
from moegeom.results.run_file import is_verified_here, num_non_finite


def unseen(measured: Measured) -> Iterator[str]:
    """What was left out: routers, tokens that are not finite, and hashes of the baseline."""
    yield from unseen_routers(measured)
    if not knows_config(measured.run):
        yield "the config (these results do not hold it)"
    loaders = measured.run.get("loaders") or {}
    if (code := loaders.get("code")) and not is_verified_here(measured.run):
        yield f"the rule in the checkpoint's own code ({listing(code)})"
    for other in loaders.get("others", ()):
        if other["reason"]:
            yield f"what {listing(other['loaders'])} load ({other['reason']})"
    if lost := num_non_finite(measured.run):
        given = (measured.run.get("tokens") or {}).get("num_tokens", lost)
        yield f"{lost:,} of {number_of(given, 'token')} (not finite)"
    silent = sum(not row.get("num_tokens") for row in measured.layers)
    if measured.has_tokens and silent:
        yield f"how {silent} of {len(measured.layers)} routers choose (no tokens of theirs)"
    if any((b := measured.before(r)) and "rule" not in b.facts for r in measured.experts):
        yield "how weights are normalised and scaled (the baseline does not say)"
    hashed = [r for r in measured.experts if (b := measured.before(r)) and b.samples]
    left = [r for r in hashed if any(e.get("expert_sample") is None for e in measured.experts[r])]
    if left:
        of = f" in {len(left)} of {len(hashed)} routers" if len(left) < len(hashed) else ""
        yield f"experts (hashes in the baseline, not compared{of})"


def unseen_routers(measured: Measured) -> Iterator[str]:
    """``2 of 60 routers``: found by name, and skipped, listed only, or not asked for.

    A router that is listed, and whose recorded choices were counted, is among the skipped tensors
    and among the measured routers: it counts once, as looked at.
    """
    if "refused" in measured.run:
        return
    checkpoint, routers = measured.run.get("checkpoint", {}), measured.run.get("routers", ())
    counted = {tensor for facts in routers for tensor in facts.get("tensors", ())}
    skipped = {entry["tensor"] for entry in checkpoint.get("skipped", ())} - counted
    found = len(routers)
    known = checkpoint.get("num_routers", found) + len(skipped)
    if known > found:
        yield f"{known - found} of {known} routers"
