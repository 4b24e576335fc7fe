"""What every report of an explanation says in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from moegeom.core.text import number_of
from moegeom.document.summary import Summary
from moegeom.studies.explain.screen._explanation import Explanation, LayerEvidence, Tried

#: Hypotheses that are shown beside nothing changed.
_SHOWN = 5

#: Layers that are shown, evenly spread.
_LAYERS = 8

#: Verdicts that are no fault.
_FINE = ("no disagreement", "arithmetic noise only")


def summary_of(explanation: Explanation) -> Summary:
    """What the header needs."""
    layers = [{"router": layer.router} for layer in explanation.layers]
    return Summary(explanation.run, layers, [], [], [])


def mood(explanation: Explanation) -> str:
    """Green only where no fault was found."""
    if explanation.verdict.cause in _FINE:
        return "good"
    return "warning" if explanation.verdict.cause == "inconclusive" else "error"


def equal(share: float) -> str:
    """A share of equal choices: rounded down, so that 100 % means all of them."""
    value = 100.0 * share
    if value == 100.0:
        return "100 %"
    digits = 3 if value > 99.9 else 2 if value > 99.0 else 1
    return f"{math.floor(value * 10.0**digits) / 10.0**digits:.{digits}f} %"


def percent(share: float) -> str:
    """Two figures; ``0`` only where there is none."""
    value = 100.0 * share
    if value == 0.0:
        return "0 %"
    return "<.001 %" if value < 0.001 else f"{value:.2g} %" if value < 99.5 else f"{value:.0f} %"


def sides(explanation: Explanation) -> list[tuple[str, str]]:
    """Label and text: what B is, how it was matched, and the other checkpoint."""
    other = explanation.other
    engine = f", {other['engine']}" if other["engine"] else ""
    stage = other["stage"].replace("_", " ")
    elsewhere = ", RECORDED FROM ANOTHER CHECKPOINT" if explanation.is_of_another else ""
    told = f"{other['name']}{engine}: {stage} of {other['num_tokens']:,} tokens{elsewhere}"
    lines = [("B", told)]
    tokens = explanation.run["tokens"]["num_tokens"]
    matched = f"{explanation.num_matched:,} of {tokens:,} tokens"
    if explanation.num_examined < explanation.num_matched:
        matched += f", the first {explanation.num_examined:,} examined"
    lines.append(("aligned", "; ".join([matched, *other["notes"]]) + "."))
    if explanation.against:
        lines.append(("C", f"{explanation.against}: what B may have loaded instead"))
    return lines


def verdict_text(explanation: Explanation) -> str:
    """The sentence that is read first; it ends with how many things nobody looked at."""
    verdict, unseen = explanation.verdict, len(explanation.not_looked_at)
    said = f"{verdict.cause}: {verdict.meaning}"
    if verdict.detail:
        said += f" {verdict.detail[:1].upper()}{verdict.detail[1:]}"
    return f"{said} Not looked at: {unseen} thing{'' if unseen == 1 else 's'}, below."


def ranked(explanation: Explanation, all_of_them: bool) -> list[str]:
    """Names of hypotheses to show: nothing changed, the verdict's, then by share in all layers."""
    layers = [layer for layer in explanation.layers if layer.tried]
    if not layers:
        return []
    names = list(dict.fromkeys(tried.name for layer in layers for tried in layer.tried))
    chosen = [names[0]]
    if explanation.verdict.hypothesis:
        chosen.append(explanation.verdict.hypothesis)
    rest = [name for name in names if name not in chosen]
    rest.sort(key=lambda name: -mean_share(explanation, name))
    return [*chosen, *(rest if all_of_them else rest[: _SHOWN + 1 - len(chosen)])]


def first_seen(explanation: Explanation, name: str) -> Tried:
    """The hypothesis at the first router where it was tried."""
    found = (layer.tried_as(name) for layer in explanation.layers)
    return next(tried for tried in found if tried is not None)


def mean_share(explanation: Explanation, name: str) -> float:
    """Share reproduced, mean over all routers; where it does not apply nothing was changed."""
    return float(np.mean([tried.share for tried in _everywhere(explanation, name)]))


def _everywhere(explanation: Explanation, name: str) -> list[Tried]:
    layers = [layer for layer in explanation.layers if layer.tried]
    return [layer.tried_as(name) or layer.tried[0] for layer in layers]


def is_held_back(explanation: Explanation, name: str) -> bool:
    """Whether its share counts ties that the verdict does not: the two are printed differently."""
    found = _everywhere(explanation, name)
    shares = (np.mean([tried.share for tried in found]), np.mean([t.credit for t in found]))
    return equal(float(shares[0])) != equal(float(shares[1]))


def ties_legend(explanation: Explanation, names: Sequence[str]) -> str:
    """What ``*`` means; empty where no row has one."""
    held = [name for name in names if is_held_back(explanation, name)]
    if not held:
        return ""
    best = max(held, key=lambda name: mean_share(explanation, name))
    credit = float(np.mean([tried.credit for tried in _everywhere(explanation, best)]))
    return (
        "* leaves equal scores: B's set counts here if it is among those that ties allow. The "
        "verdict counts it only as far as one way to break ties explains it "
        f"({first_seen(explanation, best).text}: {equal(credit)} in all layers)."
    )


def shown_layers(explanation: Explanation, all_of_them: bool) -> list[LayerEvidence]:
    """Layers to show: all, or some evenly spread with the one of the verdict."""
    layers = explanation.layers
    if all_of_them or len(layers) <= _LAYERS:
        return list(layers)
    step = (len(layers) - 1) / (_LAYERS - 1)
    numbers = {round(number * step) for number in range(_LAYERS)}
    numbers |= {
        number for number, layer in enumerate(layers) if layer.router == explanation.verdict.router
    }
    return [layers[number] for number in sorted(numbers)]


def layer_heads(explanation: Explanation) -> str:
    """What the noise in the table of layers is made from."""
    name = explanation.verdict.hypothesis
    if not name:
        return ""
    text = first_seen(explanation, name).text
    return f"of tokens that agreed before, what is left over with {text}; noise that makes as many"


def whose_inputs(explanation: Explanation) -> str:
    """What was routed again."""
    stage = explanation.run["tokens"]["stage"]
    own = "A's logits" if stage == "logits" else f"{explanation.inputs_of}'s inputs"
    return f"{own} routed again with one thing changed; share of choices equal to B's"


def growth(explanation: Explanation) -> str:
    """How the noise on the inputs grows with depth; empty where it is not known."""
    known = [layer for layer in explanation.layers if layer.noise and layer.noise.scale > 0.0]
    if len(known) < 2:
        return ""
    first, last = known[0], known[-1]
    assert first.noise is not None
    assert last.noise is not None
    summary = summary_of(explanation)
    source = "what is left over" if explanation.verdict.hypothesis else "the switches"
    return (
        f"noise on the inputs, from {source}: {percent(first.noise.scale)} of their rms in "
        f"{summary.places([first.router])}, {percent(last.noise.scale)} in "
        f"{summary.places([last.router])}. Rounding to bfloat16 alone makes 0.17 %."
    )


def details(explanation: Explanation) -> Iterator[str]:
    """What else was found: examples, renamed experts, weights, log-probs, a better place."""
    summary = summary_of(explanation)
    for layer in explanation.layers:
        if layer.noise is not None and layer.noise.num_beyond:
            named = ", ".join(f"document {d} position {p}" for d, p in layer.noise.examples)
            yield (
                f"{summary.places([layer.router])}: {layer.noise.num_beyond:,} switches beyond the "
                f"reach of noise, such as {named}."
            )
            break
    renamed = [layer for layer in explanation.layers if layer.num_renamed]
    if explanation.layers and not renamed:
        yield "numbers of experts: each fits itself best, in all layers."
    elif renamed:
        most = max(renamed, key=lambda layer: layer.num_renamed)
        yield (
            f"numbers of experts: in {summary.places([layer.router for layer in renamed])} another "
            f"numbering fits better (most in {summary.places([most.router])}: {most.num_renamed} "
            "experts)."
        )
    weights = [layer for layer in explanation.layers if layer.weights is not None]
    if weights:
        worst = max(weights, key=lambda layer: layer.weights.error if layer.weights else 0.0)
        assert worst.weights is not None
        yield (
            f"routing weights where both chose alike: differ by {worst.weights.error:.1g} at most "
            f"({summary.places([worst.router])}), relative rms."
        )
    yield from _log_probs(explanation)
    untold = {layer.reason for layer in explanation.layers if layer.reason}
    yield from (f"not tried: {reason}." for reason in sorted(untold))


def _log_probs(explanation: Explanation) -> Iterator[str]:
    joined = explanation.log_probs
    if joined is None:
        return
    tokens = number_of(joined.num_tokens, "token differs", "tokens differ")
    said = f"log-probs: {tokens} by {joined.mean:.2g} nats in the mean"
    if joined.unswitched is not None:
        said += (
            f"; {joined.unswitched:.2g} where no expert switched "
            f"({number_of(joined.num_unswitched, 'token')})"
        )
    if joined.switched is not None:
        said += f", {joined.switched:.2g} where one did"
    if joined.correlation is not None:
        said += f"; rank correlation with the number of layers that switch {joined.correlation:.2f}"
    yield f"{said}."


def limits(explanation: Explanation) -> list[str]:
    """What is not said."""
    whose = "B's own inputs are routed: every layer speaks for itself."
    if explanation.inputs_of == "A":
        whose = (
            "Only the first layer with a router reads what nothing has changed yet: deeper ones "
            "inherit what earlier ones did."
        )
    return [whose, f"Not looked at: {'; '.join(explanation.not_looked_at)}."]
