"""The lines above the verdict: what was read, how far it can be trusted, how to go on without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moegeom.core.router import RECORDED
from moegeom.core.text import number_of, percent_of_all
from moegeom.core.tokens import Stage, best_stage, bytes_per_token, common_stage, enough_logits
from moegeom.document.model import Block, Fact, Title
from moegeom.document.place import layers_without_router
from moegeom.document.rule_words import rule_brief, rule_status, rule_trust
from moegeom.document.summary import Summary
from moegeom.results.run_file import is_verified_here, num_non_finite


def size(num_bytes: float) -> str:
    """Bytes in the unit that a person would use."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below a tenth."""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def header(summary: Summary, *labels: str, name: str = "") -> list[Block]:
    """Title with the report's ``name`` or that of the checkpoint, and labelled facts."""
    title = Title(name or summary.run["checkpoint"]["name"], rule_line(summary))
    return [title, *(Fact(label, _LINES[label](summary)) for label in labels)]


def rule_line(summary: Summary) -> str:
    """The rule in words, and how far distances to its boundaries are known."""
    checkpoint, routers = summary.run["checkpoint"], summary.run["routers"]
    loaded = [router for router in routers if router.get("score") != RECORDED]
    linear = sum(router.get("is_linear", router["is_affine"]) for router in loaded)
    if not loaded:
        return f"{checkpoint['family']}: {rule_brief(checkpoint['rule'], routers)}."
    if linear == len(loaded):
        boundaries = "linear"
    elif linear == 0:
        boundaries = "non-linear"
    else:
        boundaries = f"linear in {linear} of {len(loaded)} routers"
    rule = f"{checkpoint['family']}: {rule_brief(checkpoint['rule'], routers)}"
    return f"{rule}. Boundaries are {boundaries}{_exactness(summary, linear == len(loaded))}."


def _exactness(summary: Summary, is_linear: bool) -> str:
    """How far the distances to the boundaries can be trusted, given what was recorded."""
    tokens = summary.run["tokens"]
    if tokens is not None and tokens["stage"] in ("ids", "counts"):
        return ", but there are no logits, hence no distances"
    column = [row.get("distance_exact_share") for row in summary.layers]
    shares = [share for share in column if share is not None]
    if not shares:
        if is_linear:
            return ": distances are exact"
        return "" if tokens is None else ": margins only"
    if min(shares) == 1:
        return ": distances are exact"
    least = percent_of_all(min(shares))
    return f": distances are exact for at least {least} of tokens, lower bounds for others"


def routers_line(summary: Summary) -> str:
    """How many routers, how much was read, how they are stored, which layers have none."""
    run, checkpoint = summary.run, summary.run["checkpoint"]
    num_routers, expected = checkpoint["num_routers"], checkpoint["num_expected"]
    count = f"{num_routers} found" if expected is None else f"{num_routers} of {expected} expected"
    num_scanned = len(run["routers"])
    only = f" ({num_scanned} looked at)" if num_scanned < num_routers else ""
    dtypes = sorted({router["stored_dtype"] for router in run["routers"]})
    read, total = checkpoint["bytes_read"], checkpoint["bytes_total"]
    part = f"{size(read)} of {size(total)}" if read < total else f"all {size(read)}"
    absent = layers_without_router(run.get("layers_requested"), (r["name"] for r in run["routers"]))
    note = f" {absent.capitalize()}." if absent else ""
    return (
        f"{count}{only}. Read {part} in {duration(checkpoint['seconds'])}. "
        f"Stored {', '.join(dtypes).lower()}.{note}"
    )


def tokens_line(summary: Summary) -> str:
    """Which tokens, from where."""
    tokens, trust = summary.run["tokens"], summary.run["trust"] or {}
    if tokens is None:
        return "none"
    documents = tokens["num_documents"]
    where = f" in {documents:,} document{'' if documents == 1 else 's'}" if documents else ""
    origin = {
        "matches": "recorded from this checkpoint (fingerprint matches)",
        "differs": "RECORDED FROM ANOTHER CHECKPOINT (stale inputs allowed)",
        "unknown": "from a file that does not name its checkpoint",
    }[trust.get("fingerprint", "unknown")]
    names = (summary.run.get("device") or {}).get("names")
    took = duration(summary.run["seconds"]) + (f" on {', '.join(names)}" if names else "")
    if tokens["size_bytes"]:
        source = f"{origin}. {size(tokens['size_bytes'])}, {took}"
    else:  # folded: no recording was written
        source = f"taken from the running model, nothing stored. {took}"
    return f"{tokens['num_tokens']:,}{where}, {source}{_left_out(summary)}{_decided(tokens)}"


def _decided(tokens: Mapping[str, Any]) -> str:
    """What the reader of a trace decided about its rows; nothing for a recording."""
    return f". {'; '.join(tokens['notes'])}." if tokens.get("notes") else ""


def left_out_text(run: Mapping[str, Any]) -> str:
    """How many tokens were left out, and why; begins a sentence behind another."""
    first, text = run.get("exclude_first") or 0, ""
    if lost := num_non_finite(run):
        text += f". Not finite, so left out: {lost:,}"
    if first:
        counted = number_of(first, "token") if first > 1 else "token"
        text += f". Without the first {counted} of each document"
        text += f": {num_first:,} left out" if (num_first := run.get("num_first")) else ""
    return text


def _left_out(summary: Summary) -> str:
    """What was left out on request, and outlier tokens, which are in every figure."""
    text = left_out_text(summary.run)
    if summary.num_outliers:
        layers = sum(bool(row.get("num_tokens")) for row in summary.layers)
        text += (
            f". {number_of(summary.num_outliers, 'outlier token')} in "
            f"{number_of(layers, 'layer')} (attention sinks?): "
            "population outliers, --exclude-first 1"
        )
    return text


def trust_line(summary: Summary) -> str:
    """Recorded choices, RMS of the inputs, and whether the rule is verified or assumed."""
    return " ".join([_choices(summary), *_inputs(summary.run)])


def gate_rule_line(run: Mapping[str, Any]) -> str:
    """The same for runs without counts by layer: the rule judged by the first tokens, if any."""
    text = rule_trust(run)
    if run["tokens"] is None:
        lacks = " (no recorded choices yet; a capture of 256 tokens would verify it)"
        return text + lacks if rule_status(run) == "assumed" else f"{text}."
    share = (run["trust"] or {}).get("share_reproduced")
    if share is None:
        return " ".join([_without_choices(run), *_inputs(run)])
    word, part = "verified" if is_verified_here(run) else "NOT verified", percent_of_all(share, 1)
    text = f"{word}: {part} of the first recorded choices follow from the recorded inputs."
    return " ".join([text, *_inputs(run)])


def skipped(summary: Summary) -> list[str]:
    """A line on tensors that look like routers and could not be interpreted, if there are any."""
    left_out = summary.run["checkpoint"].get("skipped")
    if not left_out:
        return []
    first = left_out[0]
    counted = f"{number_of(len(left_out), 'tensor')}{', first' if len(left_out) > 1 else ','}"
    return [f"Skipped {counted} {first['tensor']}: {first['reason']}"]


def _inputs(run: Mapping[str, Any]) -> list[str]:
    """Stage of the recording, and which of its tests failed."""
    sentences = []
    trust: Mapping[str, Any] = run["trust"] or {}
    if trust.get("rms_median") is not None:
        sentences.append(f"Inputs are router inputs (rms {trust['rms_median']:.3f}).")
    elif run["tokens"] and run["tokens"]["stage"] != "router_input":
        sentences.append(f"Recorded stage: {run['tokens']['stage'].replace('_', ' ')}.")
    failed = trust.get("overridden")
    if failed:
        counted = f"{len(failed)} failed test{'s' if len(failed) > 1 else ''}"
        sentences.append(f"{counted} allowed: {failed[0]}")
    return sentences


def _without_choices(run: Mapping[str, Any]) -> str:
    trust = rule_trust(run)
    return f"{trust} (no recorded choices)." if rule_status(run) == "assumed" else f"{trust}."


def _choices(summary: Summary) -> str:
    counted = ("num_reproduced", "num_near_tie", "num_not_reproduced")
    rows = [row for row in summary.layers if all(row.get(name) is not None for name in counted)]
    if not rows:
        return f"rule {_without_choices(summary.run)}"
    reproduced, near, beyond = (sum(row[name] for row in rows) for name in counted)
    text = f"the rule gives {reproduced:,} of {reproduced + near + beyond:,} recorded choices"
    others = [f"{near:,} differ within rounding of a tie"] * bool(near)
    others += [f"{beyond:,} DIFFER BEYOND IT"] * bool(beyond)
    return f"{'; '.join([text, *others])}."


#: Facts of a header, by their labels.
_LINES: Mapping[str, Callable[[Summary], str]] = {
    "routers": routers_line,
    "rule": lambda summary: gate_rule_line(summary.run),
    "tokens": tokens_line,
    "trust": trust_line,
}


#: Tokens that give usable errors for most layers.
_TOKENS = 16_384


def recording_hint(routers: Sequence[Mapping[str, Any]]) -> str:
    """What to type for these routers of ``run.json``; there is at least one."""
    stages: set[Stage] = {
        best_stage(r["is_affine"], r["has_selection_bias"], r["num_experts"], r["top_k"])
        for r in routers
    }
    stage = common_stage(stages)
    per_token = sum(
        bytes_per_token(
            stage, r["num_experts"], r["top_k"], r["hidden_size"], enough_logits(r["top_k"])
        )
        for r in routers
    )
    return (
        f"moegeom capture CKPT --text FILE --out REC ({size(_TOKENS * per_token)} and one forward "
        f"pass over {_TOKENS:,} tokens; from a loop of your own or an engine: docs/capture.md), "
        "then add --tokens REC."
    )
