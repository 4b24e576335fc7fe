"""What a capture says before and after."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from moegeom.core.text import number_of
from moegeom.document import View
from moegeom.document.header import size
from moegeom.document.rule_brief import rule_brief
from moegeom.document.screen import labelled, titled, to_text
from moegeom.engine.run_facts import router_facts
from moegeom.recorder.run import Captured, CapturePlan, CaptureRequest

_KEPT = {
    "router_input": "what each router reads",
    "logits": "all logits",
    "top_logits": "the {num_logits} largest logits and their experts",
    "ids": "expert numbers only (loads; no margins, no distances)",
}


def render_plan(plan: CapturePlan, request: CaptureRequest, view: View) -> str:
    """Model, what is kept, and how large that becomes."""
    return to_text(list(_plan_lines(plan, request, view.width)), view)


def _plan_lines(plan: CapturePlan, request: CaptureRequest, width: int) -> Iterator[Text]:
    routers = plan.routers
    brief = rule_brief(routers.family_text, [router_facts(r) for r in routers.routers])
    yield from titled(routers.checkpoint, f"{routers.family}: {brief}.", width)
    tokens = f"at most {number_of(plan.num_tokens, 'token')}, {plan.length:,} at a time"
    if request.fold:
        yield from labelled("keeps", f"nothing: {tokens} are measured as they come", width)
        return
    kept = _KEPT[plan.keep.stage].format(num_logits=plan.keep.num_logits)
    yield from labelled(
        "keeps",
        f"{kept}, and the model's own choices, of {len(routers.routers)} routers: "
        f"{size(plan.bytes_per_token)} a token",
        width,
    )
    if plan.keep.stage != "router_input":
        yield from labelled(
            "note", "boundary-report and explain need what each router reads: --keep hidden", width
        )
    yield from labelled(
        "size",
        f"{size(plan.num_bytes)} for {tokens} ({size(plan.free_bytes)} free) in {request.out}",
        width,
    )


def render_captured(found: Captured, request: CaptureRequest, view: View) -> str:
    """What was recorded, and what to do with it."""
    return to_text(list(_captured_lines(found, request, view.width)), view)


def _captured_lines(found: Captured, request: CaptureRequest, width: int) -> Iterator[Text]:
    resumed = f" ({found.num_resumed:,} of them by the run before)" if found.num_resumed else ""
    yield from labelled(
        "wrote",
        f"{number_of(found.num_tokens, 'token')}{resumed} in {found.num_documents:,} "
        f"{'document' if found.num_documents == 1 else 'documents'}, "
        f"{size(found.num_bytes)}: {found.out}",
        width,
    )
    if not found.has_chosen:
        yield from labelled(
            "note",
            "the model does not show what it chose: the rule stays assumed, not verified",
            width,
        )
    then = (
        f"moegeom report {found.out}"
        if request.fold
        else f"moegeom scan {request.model} --tokens {found.out}"
    )
    yield from labelled("next", then, width)
