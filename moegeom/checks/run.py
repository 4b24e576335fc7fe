"""Running the selected checks, controlling the errors of all of them together, and telling it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moegeom.checks.check import (
    CHECKS,
    NOTHING_FOUND,
    OLDER,
    Check,
    Claim,
    Limits,
    Tested,
    Unknown,
    page_of,
)
from moegeom.checks.measured import (
    Measured,
    MissingColumnError,
    knows_config,
    layer_of,
    place_of,
    unseen,
)
from moegeom.checks.profile import DEFAULT, Profile
from moegeom.checks.statistics import detectable_shift, holm_rejects
from moegeom.core.errors import InternalError
from moegeom.core.finding import SEVERITY_ORDER, Finding, Outcome, State, Verdict
from moegeom.core.metric import NO_FLIPS_MADE, RULE_HAS_NO
from moegeom.core.text import natural

#: Findings of one check that are told one by one; more are told as one.
MOST_ALIKE = 2

#: The check that judges the thresholds of a profile.
THRESHOLDS = "MGP901"

#: The check that tells rows that training moved from rows as they were initialised.
AS_INITIALISED = "MGG207"

#: What no check of this version looks at; the first, where that check could not tell, is told with
#: the verdict.
TRAINED = "whether routers were trained"
EXPERTS = "expert weights"
NOT_LOOKED_AT = (TRAINED, EXPERTS, "other engines", "quantised activations")


@dataclass(frozen=True)
class JudgedCheck:
    """Claims of one check, or why there are none."""

    check: Check
    claims: Sequence[Claim] = ()
    state: State | None = None
    reason: str = ""


def run_checks(measured: Measured, profile: Profile = DEFAULT) -> Verdict:
    """The verdict of the selected checks, in the order of their codes."""
    return next(verdicts_of(measured, profile))


def verdicts_of(measured: Measured, *profiles: Profile) -> Iterator[Verdict]:
    """The verdict of each profile; they differ in the built-in one that they extend alone, so that
    a check is judged once for all of them.
    """
    measured = dataclasses.replace(measured, thresholds=profiles[0].thresholds)
    left_out = tuple(unseen(measured))
    judged_by_code: dict[str, JudgedCheck] = {}
    for profile in profiles:
        judged = []
        for check in sorted(CHECKS.all(), key=lambda check: check.code):
            if _unread(check, measured) and not profile.names(check.code):
                continue  # what is read on request, and was not, and nobody named
            if profile.judges(check):
                if check.code not in judged_by_code:
                    judged_by_code[check.code] = _judge(check, measured, profile)
                judged.append(judged_by_code[check.code])
            elif profile.requires(check.code):
                reason = "required, and not selected"
                judged.append(JudgedCheck(check, state="inconclusive", reason=reason))
        verdict = verdict_of(judged, profile)
        states = {outcome.code: outcome.state for outcome in verdict.outcomes}
        is_seen = states.get(AS_INITIALISED) in ("passed", "failed")
        yield dataclasses.replace(
            verdict,
            not_looked_at=(*left_out, *_not_looked_at(measured, is_seen)),
            unseen=(*left_out, *(() if is_seen else (TRAINED,))),
        )


def verdict_of(judged: Sequence[JudgedCheck], profile: Profile) -> Verdict:
    """What claims of checks come to.

    Statistical statements of all checks and layers form one family: Holm's procedure keeps the
    probability that any of them fails by chance below ``profile.family_wise_error``.
    """
    tested = [
        claim
        for entry in judged
        for claim in entry.claims
        if isinstance(claim, Tested) and not _is_ignored(entry.check.code, claim.router, profile)
    ]
    level = profile.family_wise_error
    rejected = holm_rejects([claim.p_value for claim in tested], level)
    false = {id(claim) for claim, is_false in zip(tested, rejected, strict=True) if not is_false}
    blind = {
        id(claim)
        for claim in tested
        if id(claim) in false
        and claim.error > 0.0
        and claim.p_beyond > level / len(tested)
        and detectable_shift(claim.error, claim.freedom, level, len(tested) * claim.num_tests)
        > claim.room
    }
    return Verdict(
        outcomes=tuple(_outcome(entry, false, blind, profile) for entry in judged),
        fail_on=profile.fail_on,
        detectable=tuple(_detectable(judged, tested, level)),
    )


def _judge(check: Check, measured: Measured, profile: Profile) -> JudgedCheck:
    refusal = measured.run.get("refused")
    if refusal and refusal["code"] != check.code:
        # unless the refusal itself fails the gate, nothing has been judged
        severity = profile.severity.get(refusal["code"], "error")
        fails = (
            profile.selects(refusal["code"])
            and not profile.ignores(refusal["code"], None)
            and SEVERITY_ORDER[severity] <= SEVERITY_ORDER[profile.fail_on]
        )
        state: State = "needs routers" if fails else "inconclusive"
        return JudgedCheck(check, state=state, reason="the routers cannot be read")
    lacking = _lacking(check, measured)
    if lacking is not None:
        state, reason = lacking
        if profile.requires(check.code):
            state, reason = "inconclusive", f"required, and {reason}"
        return JudgedCheck(check, state=state, reason=reason)
    try:
        claims = tuple(
            claim
            for claim in check.judge(measured, _limits(check, profile))
            if not (isinstance(claim, Unknown) and claim.outside) or profile.requires(check.code)
        )
        left = {claim.router for claim in claims if isinstance(claim, Unknown)}
        missing = (claim for claim in _uncomputed(check, measured) if claim.router not in left)
        return JudgedCheck(check, (*claims, *missing))
    except MissingColumnError as missing:
        return JudgedCheck(check, state="inconclusive", reason=missing.message)


#: What is read of a checkpoint where somebody asks for it, by the inputs of checks: the key of
#: ``run.json`` that is there then, and what a check of it is without.
_ON_REQUEST: Mapping[str, tuple[str, State, str]] = {
    "experts": ("expert_values", "needs experts", "experts were not read (--experts)"),
    "attention": (
        "attention_gates",
        "does not apply",
        "gates of attention were not read (--attention)",
    ),
}


def _unread(check: Check, measured: Measured) -> tuple[State, str] | None:
    """What a check is without what nobody read; None where all is there."""
    unread = _ON_REQUEST.get(check.inputs)
    return None if unread is None or unread[0] in measured.run else unread[1:]


def _lacking(check: Check, measured: Measured) -> tuple[State, str] | None:
    """Why a check cannot be judged; None when it can."""
    if "tokens" in check.inputs and not measured.has_tokens:
        if measured.run.get("tokens"):
            return "inconclusive", "not one of the tokens is finite"
        return "needs tokens", "there are no tokens (--tokens)"
    if unread := _unread(check, measured):
        return unread
    if check.code == THRESHOLDS and not measured.thresholds:
        return "does not apply", "the profile has none"
    if "baseline" in check.inputs:
        if measured.baseline is None:
            return "needs a baseline", "there is no baseline (--baseline)"
        if "tokens" in check.inputs and not measured.baseline.num_tokens:
            return "needs tokens in the baseline", "the baseline was made without tokens"
        changed = measured.baseline.changed_versions(measured.run, check.needs)
        if changed:
            return "inconclusive", f"the baseline holds another version of {', '.join(changed)}"
    if check.facts and not measured.run.get(check.facts):
        return "does not apply", check.absent if knows_config(measured.run) else OLDER
    for need in check.needs:
        if all(row.get(need) is None for row in measured.layers):
            return None if any(_uncomputed(check, measured)) else ("does not apply", check.absent)
    if too_little := check.too_little(measured):
        if check.inputs != "experts":
            return "does not apply", too_little
        # who asks for experts that are not in the file has not had them judged
        is_there = measured.run.get("blocks", {}).get("has_experts", True)
        return "needs experts" if is_there else "inconclusive", too_little
    return None


def _uncomputed(check: Check, measured: Measured) -> Iterator[Unknown]:
    """Routers that the check is about and that lack a figure it needs, without a known reason."""
    for row in measured.layers:
        router = row["router"]
        if need := next((need for need in check.needs if row.get(need) is None), ""):
            is_due = check.concerns(measured, row)
            if is_due and "tokens" in check.inputs:
                is_due = bool(row.get("num_tokens")) and not _is_explained(measured, router, need)
            if is_due and ("baseline" not in check.inputs or measured.before(router) is not None):
                yield Unknown(router, f"{need} cannot be computed")


def _is_explained(measured: Measured, router: str, column: str) -> bool:
    """Whether rule or recording say why a router has no such figure."""
    reasons = measured.run.get("parts", {}).get(router, {}).get("reasons", {})
    metric, _, _ = measured.run.get("column_versions", {}).get(column, "").partition("/")
    return metric in reasons


def _limits(check: Check, profile: Profile) -> Limits:
    defaults = {limit.name: limit.default for limit in check.limits}

    def limit(name: str, router: str) -> float:
        if name not in defaults:
            raise InternalError(f"{check.code} has no limit '{name}'.")
        return profile.limit(check.code, name, int(layer_of(router)), defaults[name])

    return limit


def _outcome(entry: JudgedCheck, false: set[int], blind: set[int], profile: Profile) -> Outcome:
    check = entry.check
    override = profile.override(check)
    severity = override or check.severity
    statement = page_of(check).statement
    if entry.state is not None:
        return Outcome(
            check.code, check.title, severity, entry.state, entry.reason, statement=statement
        )
    claims = [claim for claim in entry.claims if id(claim) not in false]
    claimed = [c.finding if isinstance(c, Tested) else c for c in claims]
    findings = [one for one in claimed if isinstance(one, Finding)]
    if override is not None:
        findings = [dataclasses.replace(finding, severity=severity) for finding in findings]
    counted, accepted = _split(findings, profile)
    unknown = [claim for claim in entry.claims if isinstance(claim, Unknown)]
    unknown += [
        Unknown(claim.router, NOTHING_FOUND)
        for claim in entry.claims
        if isinstance(claim, Tested) and id(claim) in blind
    ]
    unknown = [u for u in unknown if not _is_ignored(check.code, u.router, profile)]
    state: State = "passed"
    reason = ""
    if unknown:
        where = sorted({claim.router for claim in unknown}, key=natural)
        more = " ..." if len(where) > 3 else ""
        reason = f"{', '.join(where[:3])}{more}: {unknown[0].reason}"
    if counted:
        state = "failed"
        severity = min(counted, key=lambda finding: SEVERITY_ORDER[finding.severity]).severity
    elif unknown:
        state = "inconclusive"
    elif accepted:
        state = "ignored"
        reason = "; ".join(dict.fromkeys(why for _, why in accepted))
    return Outcome(
        check.code,
        check.title,
        severity,
        state,
        reason,
        tuple(_grouped(check, counted)),
        tuple(accepted),
        len(unknown),
        statement,
        SEVERITY_ORDER[check.weighs("release") or check.severity],
    )


def _split(
    findings: Iterable[Finding], profile: Profile
) -> tuple[list[Finding], list[tuple[Finding, str]]]:
    """Findings that count, and accepted ones with the reason; one may be cut in two by layer."""
    left: list[Finding] = []
    accepted: list[tuple[Finding, str]] = []
    for finding in findings:
        reasons = {router: _is_ignored(finding.code, router, profile) for router in finding.routers}
        whole = profile.ignores(finding.code, None)
        if not finding.routers and whole:
            accepted.append((finding, whole.reason))
            continue
        counted = tuple(router for router, reason in reasons.items() if not reason)
        ignored = tuple(router for router, reason in reasons.items() if reason)
        if counted or not finding.routers:
            left.append(dataclasses.replace(finding, routers=counted))
        if ignored:
            accepted.append((dataclasses.replace(finding, routers=ignored), reasons[ignored[0]]))
    return left, accepted


def _is_ignored(code: str, router: str, profile: Profile) -> str:
    """The reason why a finding of this router, or all, is accepted; empty when it counts."""
    entry = profile.ignores(code, int(layer_of(router)) if "/" in router else None)
    return entry.reason if entry else ""


def _grouped(check: Check, findings: list[Finding]) -> list[Finding]:
    """Findings as they are, or one for all layers with the evidence of the worst, the first."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(check.alike(finding), []).append(finding)
    return [one for group in groups.values() for one in _as_one(check, group)]


def _as_one(check: Check, findings: list[Finding]) -> list[Finding]:
    if len(findings) <= MOST_ALIKE:
        return findings
    worst = findings[0]
    routers = tuple(dict.fromkeys(router for finding in findings for router in finding.routers))
    where = f", worst in {place_of(worst.routers[0])}" if worst.routers else ", first"
    says_more = worst.title.rstrip(".") != check.title
    title = f"{check.title}{where}{f': {worst.title}' if says_more else '.'}"
    return [dataclasses.replace(worst, routers=routers, title=title)]


def _detectable(
    judged: Sequence[JudgedCheck], tested: Sequence[Tested], level: float
) -> Iterable[str]:
    """For each statistical check, what it would have found nine times in ten."""
    counted = {id(claim) for claim in tested}
    for entry in judged:
        if entry.check.detects is None:
            continue
        shifts = [
            detectable_shift(claim.error, claim.freedom, level, len(tested) * claim.num_tests)
            for claim in entry.claims
            if isinstance(claim, Tested) and id(claim) in counted and claim.error > 0.0
        ]
        if shifts:
            yield entry.check.detects(statistics.median(shifts))


def _not_looked_at(measured: Measured, is_training_seen: bool) -> tuple[str, ...]:
    lacking = ("load, margins, dead experts (no tokens)",) * (not measured.has_tokens)
    is_sampled = _ON_REQUEST["experts"][0] in measured.run
    beyond = {EXPERTS: f"{EXPERTS} beyond a sample"} if is_sampled else {}
    if not measured.run.get("blocks", {}).get("has_experts", True):
        beyond = {EXPERTS: f"{EXPERTS} (none in the file)"}
    rest = NOT_LOOKED_AT[1:] if is_training_seen else NOT_LOOKED_AT
    return (*lacking, *(beyond.get(part, part) for part in rest))


def judge(
    measured: Measured, reasons: Mapping[str, Mapping[str, str]], notes: Sequence[str]
) -> tuple[list[Finding], dict[str, list[str]]]:
    """Findings of all checks, then notes; and by fact of ``run.json`` the codes of checks.

    ``checks_not_judged`` did not pass and did not fail; ``checks_inconclusive``, which are among
    them or passed in part, had what they need, and it was too little.

    ``reasons`` says by router and metric why a figure is missing; equal reasons make one note,
    and what the rule does not have, or nobody asked for, makes none.
    """
    verdict = run_checks(measured)
    findings = list(verdict.findings)
    where: dict[tuple[str, str], list[str]] = {}
    for router, why in reasons.items():
        for metric, reason in why.items():
            if not reason.startswith((RULE_HAS_NO, NO_FLIPS_MADE)):
                where.setdefault((metric, reason), []).append(router)
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (metric, reason), routers in where.items():
        alike.setdefault((reason, tuple(routers)), []).append(metric)
    findings += [_missing(metrics, reason, routers) for (reason, routers), metrics in alike.items()]
    findings += [Finding("note", "", (), note) for note in notes]
    codes = {
        "checks_not_judged": [
            o.code for o in verdict.outcomes if o.state not in ("passed", "failed")
        ],
        "checks_inconclusive": [o.code for o in verdict.open],
    }
    return findings, codes


#: Metrics that a note names in its sentence; of more it gives the number there.
_FEW = 3


def _missing(metrics: Sequence[str], reason: str, routers: tuple[str, ...]) -> Finding:
    """The note that these metrics have no value, for one reason."""
    names = ", ".join(metrics)
    if len(metrics) > _FEW:
        return Finding(
            "note", "", routers, f"{len(metrics)} metrics are missing: {reason}.", f"{names}."
        )
    are = "is" if len(metrics) == 1 else "are"
    return Finding("note", "", routers, f"{names} {are} missing: {reason}.")
