"""From evidence to one verdict out of the closed list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moegeom.core.text import number_of
from moegeom.studies.explain.record import (
    Cause,
    CauseVerdict,
    LayerEvidence,
    LogProbs,
    Tried,
    num_hypotheses,
)
from moegeom.tokens.traces.alignment import Placing

#: A hypothesis is believed where it removes at least this share of the disagreements, net, and
#: stands above nothing changed by this many standard errors; in this and all later layers together
#: by that many, with so many disagreements to explain. By chance one
#: of 30 hypotheses fixes that much and stands so once in 10^3 runs.
_REPAIRS, _STANDS, _STANDS_IN_ALL, _LEAST = 0.5, 2.0, 4.0, 10.0

#: Hypotheses whose fixes differ by less are equally good: the first of the table is believed.
_AS_GOOD = 0.02

#: Flips that noise could not have made, before they are called a bug: one may be chance.
_BEYOND = 3

#: Noise on the inputs of a router beyond which it is not rounding: 5 % of their rms, 30 roundings
#: to bfloat16. Heuristic.
_MOST_NOISE = 0.05

#: Roundings to bfloat16 that a router's own arithmetic may be worth: of its input, of its rows, of
#: its logits. Inputs that are alike by this factor do not carry more. Heuristic.
_OWN_ROUNDINGS, _MUCH_LESS = 3.0, 4.0

#: Mean difference of log-probabilities, in nats, that arithmetic leaves. Heuristic.
_LOG_PROB_NOISE = 0.05

#: Tokens that never flip differ this much as the others do: flipping is not what matters.
_ALIKE, _UNRELATED = 0.5, 0.1

#: Sets that overlap beyond chance by less than these shares of what equal sets would, as they are
#: and with B's experts numbered as fits best (which fits chance too), are unrelated; with as many
#: tokens at least. Heuristic.
_CHANCE, _CHANCE_RENAMED, _ENOUGH = 0.05, 0.25, 64

#: Relative error of routing weights that are stored in bfloat16, with room for the scores' own.
_SAME_WEIGHTS = 2.0**-6


@dataclass(frozen=True)
class Evidence:
    """What the verdict is made of; ``names`` says a router in words.

    ``is_of_another`` where B was recorded from routers of another fingerprint.
    """

    layers: Sequence[LayerEvidence]
    placing: Placing | None
    num_padding: int
    num_matched: int
    any_share: float
    log_probs: LogProbs | None
    has_other_inputs: bool
    is_of_another: bool
    names: Callable[[str], str]


def verdict(found: Evidence) -> CauseVerdict:
    """The first rule that has something to say, in the order of ``_RULES``."""
    for rule in _RULES:
        said = rule(found)
        if said is not None:
            return said
    return CauseVerdict("inconclusive", f"{_share(found)} {_unexplained(found)}")


def _padding(found: Evidence) -> CauseVerdict | None:
    if not found.num_padding:
        return None
    return CauseVerdict(
        "padding counted",
        f"{found.num_padding:,} of {found.num_matched:,} tokens have one and the same set in every "
        "layer of B, and another one in A.",
    )


def _shifted(found: Evidence) -> CauseVerdict | None:
    place = found.placing
    if place is None or not place.is_misplaced:
        return None
    missing = 1.0 - place.here.share
    if (place.best.share - place.here.share) / missing < _REPAIRS:
        return None
    cause: Cause = "tokens shifted" if place.best.token_shift else "layers shifted"
    return CauseVerdict(cause, f"{place.measured}.")


def _no_disagreement(found: Evidence) -> CauseVerdict | None:
    if any(layer.agreement < 1.0 for layer in found.layers):
        return None
    if found.num_matched < _ENOUGH:
        matched = f"The {number_of(found.num_matched, 'token')} that are matched agree"
        few = f"{matched}; fewer than {_ENOUGH} say little."
        return CauseVerdict("inconclusive", few)
    return _wrong_weights(found) or _elsewhere(found, "") or CauseVerdict("no disagreement", "")


def _wrong_weights(found: Evidence) -> CauseVerdict | None:
    for layer in found.layers:
        rule = layer.weights
        if rule is None or rule.error <= _SAME_WEIGHTS:
            continue
        where = f"from {found.names(layer.router)} on weights differ by {rule.error:.2g}, relative"
        if rule.with_bias is not None and rule.with_bias <= _SAME_WEIGHTS:
            detail = f"{where}; with the selection bias in the scores by {rule.with_bias:.1g}."
            return CauseVerdict("bias in routing weights", detail, layer.router)
        near = f"nearest is {rule.nearest} ({rule.nearest_error:.2g})"
        return CauseVerdict("routing weights differ", f"{where}; {near}.", layer.router)
    return None


def _hypothesis(found: Evidence) -> CauseVerdict | None:
    """The best hypothesis at the first router where one explains what nothing changed does not."""
    for number, layer in enumerate(found.layers):
        best = _best(found.layers[number:])
        if best is None and _is_beyond(layer):
            return None  # what begins here is not explained; later routers inherit it
        if best is None or layer.nothing is None:
            continue
        where = found.names(layer.router)
        begins = "the first layer" if number == 0 else f"{where}, before which nothing does"
        explained = [_explains(later, best.name) for later in found.layers[number:]]
        return CauseVerdict(
            best.cause,
            f"{best.text} reproduces {_percent(best.share)} of B's choices in {where}, nothing "
            f"changed {_percent(layer.nothing.share)}; it begins in {begins}, and explains "
            f"{sum(explained)} of {len(found.layers)} layers.",
            layer.router,
            best.name,
        )
    return None


def _best(layers: Sequence[LayerEvidence]) -> Tried | None:
    """What explains the first of these routers; the first of those that are as good."""
    good = [
        tried
        for tried in layers[0].tried[1:]
        if _explains(layers[0], tried.name) and _standing(layers, tried.name) >= _STANDS_IN_ALL
    ]
    most = max((tried.repaired for tried in good), default=0.0)
    enough = most if most >= 1.0 else most - _AS_GOOD  # what reproduces everything is exact
    return next((tried for tried in good if tried.repaired >= enough), None)


def _explains(layer: LayerEvidence, name: str) -> bool:
    """Whether the hypothesis removes most of the disagreements at this router."""
    tried = layer.tried_as(name)
    return tried is not None and tried.repaired >= _REPAIRS and tried.standing >= _STANDS


def _standing(layers: Sequence[LayerEvidence], name: str) -> float:
    """Standard errors in all of these routers together; 0 where there is little to explain."""
    gained = squares = missing = 0.0
    for layer in layers:
        tried = layer.tried_as(name)
        if tried is None or layer.nothing is None or tried.standing == 0.0:
            continue
        left = (1.0 - layer.nothing.credit) * layer.num_tried
        gained += tried.repaired * left
        squares += (tried.repaired * left / tried.standing) ** 2
        missing += left
    return gained / np.sqrt(squares) if squares and missing >= _LEAST else 0.0


def _is_beyond(layer: LayerEvidence) -> bool:
    return layer.noise is not None and layer.noise.num_beyond >= _BEYOND


def _another_checkpoint(found: Evidence) -> CauseVerdict | None:
    """Nothing on the list explains B, and its recording says that it is not of these routers."""
    if not found.is_of_another:
        return None
    return CauseVerdict("another checkpoint", f"{_share(found)} {_unexplained(found)}")


def _unrelated(found: Evidence) -> CauseVerdict | None:
    if found.num_matched < _ENOUGH or not found.layers:
        return None
    most = max(layer.beyond_chance for layer in found.layers)
    renamed = max(layer.beyond_chance_renamed for layer in found.layers)
    if most > _CHANCE or renamed > _CHANCE_RENAMED:
        return None
    overlap = (
        f"Sets overlap no more than those of two dice: by {_percent(max(most, 0.0))} of what equal "
        "sets would, in any layer."
    )
    return CauseVerdict("unrelated", f"{_share(found)} {overlap}")


def _innocent(found: Evidence) -> CauseVerdict | None:
    """B's own inputs, through the router of A, give B's choices: what differs are the inputs."""
    if not found.has_other_inputs:
        return None
    nothing = [layer.nothing for layer in found.layers if layer.nothing is not None]
    if len(nothing) < len(found.layers):
        return None
    left = sum(1.0 - tried.credit for tried in nothing)
    differ = sum(1.0 - layer.agreement for layer in found.layers)
    if left > (1.0 - _REPAIRS) * differ:
        return None
    measured = [layer.noise.measured for layer in found.layers if layer.noise is not None]
    sizes = [size for size in measured if size is not None]
    own = (
        f"the router of A gives {_percent(1.0 - left / len(nothing))} of B's choices on B's inputs"
    )
    if not sizes:
        return CauseVerdict("not the router", f"{own}.")
    most = max(sizes)
    differs = f"{own}; those inputs differ from A's by up to {_percent(most)} of their rms"
    if most > _MOST_NOISE:
        return CauseVerdict("not the router", f"{differs}, more than rounding does.")
    return _elsewhere(found, differs) or CauseVerdict("arithmetic noise only", f"{differs}.")


def _beyond_noise(found: Evidence) -> CauseVerdict | None:
    for layer in found.layers:
        noise = layer.noise
        if noise is not None and _is_beyond(layer):
            detail = (
                f"{_share(found)} In {found.names(layer.router)} "
                f"{number_of(noise.num_beyond, 'token')} that "
                f"agreed before flip further from a boundary than noise of {_percent(noise.scale)} "
                f"of the input, which fits the others, can carry. {_unexplained(found)}"
            )
            return CauseVerdict("beyond noise", detail, layer.router)
    return None


def _at_the_router(found: Evidence) -> CauseVerdict | None:
    """Inputs that are recorded on both sides and too much alike for what B chooses otherwise."""
    for layer in found.layers:
        noise = layer.noise
        if noise is None or noise.measured is None or noise.roundings <= _OWN_ROUNDINGS:
            continue
        if noise.measured < noise.scale / _MUCH_LESS:
            detail = (
                f"{_share(found)} In {found.names(layer.router)} it takes noise of "
                f"{_percent(noise.scale)} of the input ({noise.roundings:.2g} roundings to "
                f"bfloat16) to make as many, and the recorded inputs of A and B differ by "
                f"{_percent(noise.measured)}: what differs is B's router. {_unexplained(found)}"
            )
            return CauseVerdict("beyond noise", detail, layer.router)
    return None


def _noise(found: Evidence) -> CauseVerdict | None:
    known = [(layer.router, layer.noise) for layer in found.layers if layer.noise is not None]
    if not known:
        return None
    router, most = max(known, key=lambda pair: pair[1].scale)
    size = f"{_percent(most.scale)} of the input ({most.roundings:.2g} roundings to bfloat16)"
    said = f"{_share(found)} Noise of up to {size}, in {found.names(router)}, makes as many"
    if most.scale > _MOST_NOISE:
        # choices alone cannot tell noise that large from a router that was changed as much
        detail = (
            f"{said}, which is more than rounding leaves; so would another router. "
            f"{_unexplained(found)}"
        )
        return _elsewhere(found, said) or CauseVerdict("inconclusive", detail)
    return _wrong_weights(found) or _elsewhere(found, said) or _only_noise(found, f"{said}.")


def _only_noise(found: Evidence, said: str) -> CauseVerdict:
    """Noise, where a hypothesis could have won; else what is recorded cannot tell."""
    if any(not layer.tried for layer in found.layers):
        return CauseVerdict(
            "inconclusive", f"{said} {_unexplained(found)} Not every layer could be tried."
        )
    missing = sum(
        (1.0 - layer.nothing.credit) * layer.num_tried
        for layer in found.layers
        if layer.nothing is not None
    )
    if missing < _LEAST:
        few = number_of(round(missing), "disagreement is", "disagreements are")
        few += " too few for a hypothesis to stand out from chance."
        return CauseVerdict("inconclusive", f"{said} {few}")
    return CauseVerdict("arithmetic noise only", f"{said} {_unexplained(found)}")


def _elsewhere(found: Evidence, said: str) -> CauseVerdict | None:
    """Log-probabilities that differ where no expert flipped."""
    joined = found.log_probs
    if joined is None or joined.mean <= _LOG_PROB_NOISE:
        return None
    apart = f"log-probs differ by {joined.mean:.2g} nats in the mean"
    if joined.unflipped is not None and joined.unflipped >= _ALIKE * (joined.flipped or 0.0):
        detail = f"{apart}, by {joined.unflipped:.2g} where no expert flipped"
    elif joined.unflipped is None and abs(joined.correlation or 0.0) < _UNRELATED:
        detail = f"{apart}, whether few or many layers flipped"
    else:
        return None
    return CauseVerdict("not the router", f"{said}{'; ' if said else ''}{detail}.")


def _unexplained(found: Evidence) -> str:
    tried = num_hypotheses(found.layers)
    if not tried:
        return "No hypothesis could be tried."
    return f"Nothing in the list explains it (tried: {tried} hypotheses)."


def _share(found: Evidence) -> str:
    mean = float(np.mean([1.0 - layer.agreement for layer in found.layers]))
    return (
        f"A and B choose differently in {_percent(mean)} of (token, layer) pairs; "
        f"{_percent(found.any_share)} of tokens differ somewhere."
    )


def _percent(share: float) -> str:
    value = 100.0 * share
    if 99.0 < value < 100.0:
        return f"{np.floor(100.0 * value) / 100.0:.2f} %"
    return f"{value:.0f} %" if value in (0.0, 100.0) else f"{value:.2g} %"


#: In the order in which they are asked.
_RULES: tuple[Callable[[Evidence], CauseVerdict | None], ...] = (
    _no_disagreement,
    _shifted,
    _padding,
    _hypothesis,
    _another_checkpoint,
    _unrelated,
    _innocent,
    _beyond_noise,
    _at_the_router,
    _noise,
)
