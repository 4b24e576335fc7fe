"""Documents of a capture: the plan before it, the summary after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from moegeom.core.text import number_of
from moegeom.core.tokens import ONE_DOCUMENT
from moegeom.document.header import size
from moegeom.document.model import Block, Command, Document, Excerpt, Fact, Title, View
from moegeom.document.rule_words import rule_brief
from moegeom.engine.run_facts import router_facts
from moegeom.kernels.batch import NUM_BLOCKS
from moegeom.recorder.request import CaptureRequest
from moegeom.recorder.run import AttentionPlan, Captured, CapturePlan

_KEPT = {
    "router_input": "what each router reads",
    "logits": "all logits",
    "top_logits": "the {num_logits} largest logits and their experts",
    "ids": "expert numbers only (loads; no margins, no distances)",
}


def plan_document(
    plan: CapturePlan | AttentionPlan, request: CaptureRequest, view: View
) -> Document:
    """Model, what is kept, and how large that becomes."""
    del view
    if isinstance(plan, AttentionPlan):
        facts = [*_planned_attention(plan, request)]
        return Document("capture", plan.checkpoint, [facts], lambda: dataclasses.asdict(plan))
    blocks = [*_planned(plan, request)]
    return Document(
        "capture", plan.routers.checkpoint, [blocks], lambda: _plan_record(plan, request)
    )


def _planned_attention(plan: AttentionPlan, request: CaptureRequest) -> Iterator[Block]:
    layers = number_of(len(plan.layers), "attention layer")
    yield Title(plan.checkpoint, f"{plan.family}: {layers} with gates or learned sinks.")
    yield Fact(
        "keeps",
        "sums of gates, attention and energy by head, and no token: at most "
        f"{number_of(plan.num_tokens, 'token')} go through, {plan.length:,} at a time",
    )
    if not any(text.holds_many for text in request.texts):
        yield from _too_few(len(request.texts))


def _planned(plan: CapturePlan, request: CaptureRequest) -> Iterator[Block]:
    routers = plan.routers
    brief = rule_brief(routers.family_text, [router_facts(r) for r in routers.routers])
    yield Title(routers.checkpoint, f"{routers.family}: {brief}.")
    tokens = f"at most {number_of(plan.num_tokens, 'token')}, {plan.length:,} at a time"
    if request.fold:
        yield Fact("keeps", f"nothing: {tokens} are measured as they come")
        return
    contents = _KEPT[plan.keep.stage].format(num_logits=plan.keep.num_logits)
    if plan.keep.outputs:
        every = "expert_output" in plan.keep.outputs
        contents += f", what shared and routed experts give{', and every expert' if every else ''}"
    yield Fact(
        "keeps",
        f"{contents}, and the model's own choices, of {len(routers.routers)} routers: "
        f"{size(plan.bytes_per_token)} a token",
    )
    yield Fact(
        "size",
        f"{size(plan.num_bytes)} for {tokens} ({size(plan.free_bytes)} free) in {request.out}",
    )
    if plan.keep.stage != "router_input":
        yield Fact("note", "boundary-report and explain need what each router reads: --keep hidden")
    if not any(text.holds_many for text in request.texts):
        yield from _too_few(len(request.texts))


def _too_few(num_documents: int) -> Iterator[Fact]:
    """A warning where there will be too few documents for good standard errors."""
    if num_documents < NUM_BLOCKS:
        yield Fact(
            "note",
            f"{number_of(num_documents, 'document')}: standard errors count documents, and so do "
            f"the checks on tokens: 2 are needed, {NUM_BLOCKS} better ({ONE_DOCUMENT})",
        )


def _plan_record(plan: CapturePlan, request: CaptureRequest) -> Mapping[str, Any]:
    return {
        "checkpoint": plan.routers.checkpoint,
        "family": plan.routers.family,
        "num_routers": len(plan.routers.routers),
        "fold": request.fold,
        "stage": plan.keep.stage,
        "num_logits": plan.keep.num_logits,
        "outputs": list(plan.keep.outputs),
        "num_tokens": plan.num_tokens,
        "length": plan.length,
        "bytes_per_token": plan.bytes_per_token,
        "num_bytes": plan.num_bytes,
        "free_bytes": plan.free_bytes,
        "out": str(request.out),
    }


def captured_document(capture: Captured, request: CaptureRequest, view: View) -> Document:
    """What was recorded, and the next command."""
    del view
    blocks = [*_captured(capture, request)]
    return Document("capture", str(capture.out), [blocks], lambda: _record(capture, request))


def _captured(capture: Captured, request: CaptureRequest) -> Iterator[Block]:
    resumed = f" ({capture.num_resumed:,} of them by the run before)" if capture.num_resumed else ""
    yield Fact(
        "wrote",
        f"{number_of(capture.num_tokens, 'token')}{resumed} in {capture.num_documents:,} "
        f"{'document' if capture.num_documents == 1 else 'documents'}, "
        f"{size(capture.num_bytes)}: {capture.out}",
    )
    if capture.num_flips:
        yield Fact(
            "flips",
            f"{number_of(capture.num_flips, 'token')} flipped at a router, one at a time: "
            f"{capture.harm:.3g} nats of KL in the next token on average; boundary-report and "
            "explain say which layers",
        )
    for name, reason in capture.reasons.items():
        yield Fact("note", f"router {name}: no flip was made: {reason}")
    if not capture.has_chosen:
        yield Fact(
            "note", "the model does not show what it chose: the rule stays assumed, not verified"
        )
    if any(text.holds_many for text in request.texts):  # else it was said before the capture
        yield from _too_few(capture.num_documents)
    then = _next(capture, request)
    yield Excerpt([Fact("next", then)], [Command("next", then)])


def _next(capture: Captured, request: CaptureRequest) -> str:
    if request.fold:
        return f"moegeom report {capture.out}"
    if request.is_attention:
        return f"moegeom research attention {request.model} --tokens {capture.out}"
    return f"moegeom scan {request.model} --tokens {capture.out}"


def _record(capture: Captured, request: CaptureRequest) -> Mapping[str, Any]:
    return {
        **dataclasses.asdict(capture),
        "out": str(capture.out),
        "fold": request.fold,
        "next_command": _next(capture, request),
    }
