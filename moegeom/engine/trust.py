"""May these tokens be believed? Tests on the first tokens, before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from moegeom.core.digest import digits_of
from moegeom.core.errors import RecordingError
from moegeom.core.router import Router
from moegeom.core.text import all_of, number_of, percent
from moegeom.core.tokens import TILE, TokenSource
from moegeom.engine.batch import LazyBatch
from moegeom.engine.parameters import option_of
from moegeom.engine.plan import one_blas_thread
from moegeom.engine.prepared import PreparedRouter, check_width, other_number_hint
from moegeom.engine.task import Task
from moegeom.kernels.reduction import Kernels
from moegeom.tokens.validity import FingerprintVerdict, RmsTest, fingerprint_test, rms_test

#: Tokens looked at before a scan, per router.
FIRST_TOKENS = 8 * TILE

#: Below this share of reproduced choices the recording is of another router, layer or rule; an
#: engine in bf16 still reproduces more than nine in ten (docs/recordings.md).
_LEAST_REPRODUCED = 0.8

#: From this share on the recorded choices say that the inputs are those of the router.
_MOST_REPRODUCED = 0.99

#: Probabilities in bfloat16 add up to 1 within half a step of it.
_SUM_TOLERANCE = 2.0**-8

#: So many numbers, with this much of the range from 0 to 1, are no logits of a narrow router.
_LEAST_SCORES = 4096
_LEAST_RANGE = 0.5

_LOGITS_HINT = (
    "Save the logits, which the score is taken of; of probabilities p of a softmax np.log(p) gives "
    "the same choices and weights, of scores s of a sigmoid np.log(s / (1 - s))."
)

#: Fewer numbers than this may be equal by chance, in bfloat16: the two largest logits of one token
#: in thirty, five of one in a million.
_LEAST_EQUAL = 5

_BLANK_HINT = (
    "Leave out padding and rows that nothing was written to: they would be counted as tokens that "
    "choose the experts with the lowest numbers."
)


@dataclass(frozen=True)
class Trust:
    """What the tests found; printed, and stored in ``run.json``.

    ``rms_median`` and ``share_reproduced`` are missing where they could not be tested.
    """

    fingerprint: FingerprintVerdict
    rms_median: float | None
    share_reproduced: float | None
    overridden: tuple[str, ...] = ()


def examine(
    prepared: Iterable[PreparedRouter],
    source: TokenSource,
    fingerprint: str,
    kernels: Kernels,
    allow: Mapping[str, bool],
) -> Trust:
    """Fingerprint, RMS of the inputs and recorded choices, on the first tokens of each router.

    ``allow`` turns a failing test into a label: keys ``stale_inputs`` (fingerprint) and
    ``unverified`` (the other two).

    Raises
    ------
    RecordingError
        With the numbers, when a test fails and is not allowed to.
    """
    overridden: list[str] = []

    def fail(message: str, hint: str, key: str) -> None:
        if not allow[key]:
            instead = f"{option_of(key)} goes on and labels the results."
            raise RecordingError(message, f"{hint} {instead}")
        overridden.append(message)

    facts = source.facts
    verdict = fingerprint_test(facts.fingerprint, fingerprint)
    if verdict == "differs":
        fail(
            f"{facts.name}: {_difference(facts.fingerprint, fingerprint)}.",
            "Record this checkpoint.",
            "stale_inputs",
        )
    medians, shares = [], []
    for router in prepared:
        share = _reproduced(router, source, kernels)
        rms = _rms(router.router, source)
        if rms is not None:
            medians.append(rms.median)
            # A model whose residual stream is as small as the norm's eps has such inputs. Choices
            # alone do not tell the length of an input; that of this checkpoint's own tokens is
            # what its recorder saw.
            is_small = rms.eps_may_explain and verdict == "matches"
            if not rms.passed and not (is_small and (share or 0.0) >= _MOST_REPRODUCED):
                fail(
                    f"{facts.name}, router {router.router.name}: {rms.sentence}",
                    "Record what the router reads"
                    + (", or give a foreign file --stage pre_norm." if rms.is_of_the_norm else "."),
                    "unverified",
                )
        if _is_behind_norm(router.router, source):
            fail(
                f"{facts.name}, router {router.router.name}: given as stage pre_norm, but the rms "
                "over the gain of the norm is 1 for every token: the norm was applied already.",
                "Give a foreign file --stage router_input; record anything else at that stage.",
                "unverified",
            )
        if flaw := _probabilities(router.router, source):
            fail(f"{facts.name}, router {router.router.name}: {flaw}", _LOGITS_HINT, "unverified")
        elif flaw := _blank(router.router, source):
            fail(f"{facts.name}, router {router.router.name}: {flaw}", _BLANK_HINT, "unverified")
        if share is not None:
            shares.append(share)
            top_k, recorded = router.router.rule.top_k, _num_recorded(router.router, source)
            if share < _LEAST_REPRODUCED and router.router.rule.num_chosen not in (None, recorded):
                fail(
                    f"{facts.name}, router {router.router.name}: "
                    f"{number_of(recorded, 'expert is', 'experts are')} recorded "
                    f"for each token, and the rule chooses {top_k}.",
                    other_number_hint(recorded),
                    "unverified",
                )
            elif share < _LEAST_REPRODUCED:
                fail(
                    f"{facts.name}, router {router.router.name}: only "
                    f"{percent(share, '.1f')} of the first recorded choices follow from the "
                    "recorded inputs by this rule "
                    f"({router.router.rule.selection_score_unit} selection).",
                    "Another layer, another rule (a fork of the family?) or shifted tokens.",
                    "unverified",
                )
    return Trust(
        fingerprint=verdict,
        rms_median=float(np.median(medians)) if medians else None,
        share_reproduced=float(np.mean(shares)) if shares else None,
        overridden=tuple(overridden),
    )


def _rms(router: Router, source: TokenSource) -> RmsTest | None:
    if source.facts.stage != "router_input" or router.norm is None:
        return None
    stop = min(FIRST_TOKENS, source.facts.num_tokens)
    values = source.read_values(router.name, 0, stop)
    check_width(router, "router_input", values.shape[1], source.facts.name)
    return rms_test(values, router.gain, router.norm, router.norm_bias)


def _is_behind_norm(router: Router, source: TokenSource) -> bool:
    """True when inputs that are said to lie in front of the norm are what the norm gives."""
    if source.facts.stage != "pre_norm" or router.norm is None:
        return False
    values = source.read_values(router.name, 0, min(FIRST_TOKENS, source.facts.num_tokens))
    if values.shape[1] != router.hidden_size:
        return False  # the scan says so
    return rms_test(values, router.gain, router.norm, router.norm_bias).is_constant


def _probabilities(router: Router, source: TokenSource) -> str:
    """What speaks for scores where logits should be; empty when nothing does.

    Logits of all tokens in [0, 1] with sums of 1 are probabilities. Sigmoids have no sum: there it
    takes many numbers, and more of their range than the logits of a narrow router would fill.
    """
    if source.facts.stage != "logits" or router.num_experts < 2:
        return ""
    values = source.read_values(router.name, 0, min(FIRST_TOKENS, source.facts.num_tokens))
    values = values[np.isfinite(values).all(axis=1) & values.any(axis=1)].astype(np.float64)
    if not values.size or values.min() < 0.0 or values.max() > 1.0:
        return ""
    if np.abs(values.sum(axis=1) - 1.0).max() <= _SUM_TOLERANCE:
        looked_at = all_of(
            len(values), "token that was looked at has", "tokens that were looked at have"
        )
        return (
            f"given as stage logits, but these are probabilities: {looked_at} numbers from 0 to 1 "
            "with sum 1."
        )
    is_certain = values.size >= _LEAST_SCORES and np.ptp(values) > _LEAST_RANGE
    if router.rule.score == "sigmoid" and is_certain:
        return (
            f"given as stage logits, but these are scores behind the sigmoid: all {values.size:,} "
            f"numbers that were looked at lie in 0 to 1, from {values.min():.3g} to "
            f"{values.max():.3g}."
        )
    return ""


def _blank(router: Router, source: TokenSource) -> str:
    """What speaks for rows that no token made; empty when nothing does.

    Looked at are as many tokens as by the other tests, spread over the stream: padding may lie
    anywhere. A row is blank when all its numbers are 0, or when all its logits are equal; a router
    whose rows are equal has such logits. Told with them is where they lie, if that is a pattern.
    """
    stage = source.facts.stage
    if stage not in ("logits", "top_logits", "pre_norm", "router_input"):
        return ""
    is_input = stage in ("pre_norm", "router_input")
    if not is_input and (router.weight == router.weight[0]).all():
        return ""
    num_zero = num_equal = num_seen = num_first = 0
    for start in _spread_tiles(source.facts.num_tokens):
        stop = min(start + TILE, source.facts.num_tokens)
        if stage == "top_logits":
            values = source.read_top_logits(router.name, start, stop).logits
        else:
            values = source.read_values(router.name, start, stop)
        is_zero = ~values.any(axis=1)
        num_seen += len(values)
        num_zero += int(is_zero.sum())
        if is_zero.any() and source.facts.has_documents:
            position = source.read_columns(start, stop).position
            num_first += int((is_zero & (position == 0)).sum())
        if not is_input and values.shape[1] >= _LEAST_EQUAL:
            is_equal = (values == values[:, :1]).all(axis=1)
            num_equal += int((is_equal & ~is_zero).sum())
    if not (num_zero or num_equal):
        return ""
    are_first = ", each the first of its document" if num_first == num_zero else ""
    flaws = [f"{number_of(num_zero, 'holds', 'hold')} nothing but 0{are_first}"] * bool(num_zero)
    holds = number_of(num_equal, "holds", "hold")
    flaws += [f"{holds} the same logit for every expert"] * bool(num_equal)
    return (
        f"of {num_seen:,} tokens that were looked at, {' and '.join(flaws)}: padding, or rows that "
        "were never written."
    )


def _spread_tiles(num_tokens: int) -> list[int]:
    """First tokens of as many tiles as ``FIRST_TOKENS`` holds, evenly spread over the stream."""
    tiles = -(-num_tokens // TILE)
    num_sampled = min(tiles, FIRST_TOKENS // TILE)
    return [TILE * (tiles * i // num_sampled) for i in range(num_sampled)]


def _num_recorded(router: Router, source: TokenSource) -> int:
    """Experts that are recorded for each token."""
    chosen = source.read_chosen(router.name, 0, 1)
    return router.rule.top_k if chosen is None else chosen.shape[1]


def _reproduced(prepared: PreparedRouter, source: TokenSource, kernels: Kernels) -> float | None:
    """Share of the first recorded choices that are reproduced or within the bound of a tie."""
    if not source.facts.has_chosen or source.facts.stage == "ids" or prepared.router.listed:
        return None
    task, total, shares = Task(prepared, source, kernels), source.facts.num_tokens, []
    with one_blas_thread():  # the arithmetic of the scan
        for start in range(0, min(FIRST_TOKENS, total), TILE):
            batch = LazyBatch(task, start, min(start + TILE, total))
            matches = batch.matches_recording
            if matches is None:
                return None
            if batch.float_bound is not None and batch.effective_margin is not None:
                matches = matches | (batch.effective_margin <= batch.float_bound)
            shares.append(matches)
    matches = np.concatenate(shares)
    return float(matches.mean()) if len(matches) else None


def _difference(recorded: str, own: str) -> str:
    """How the fingerprint in a recording differs from that of the checkpoint."""
    kind, digits, every = recorded.rpartition(":")[0], digits_of(recorded), digits_of(own)
    if kind and not own.startswith(f"{kind}:"):
        return f"names its checkpoint by a hash that is no longer believed ({kind[:20]})"
    if (some := digits.strip(".")) and every.startswith(some):
        return f"holds {len(some)} of the {len(every)} digits of its checkpoint's fingerprint"
    return (
        f"recorded from another checkpoint: its routers have fingerprint {digits[:12]}, these have "
        f"{every[:12]}"
    )
