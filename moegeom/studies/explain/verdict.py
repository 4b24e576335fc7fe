"""From evidence to one verdict out of the closed list."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from moegeom.core.text import number_of, percent, percent_of_all
from moegeom.studies.explain.record import CauseVerdict, EmptySlots, Evidence, LayerEvidence
from moegeom.studies.faults.exchangeable import LEVEL, NUM_TESTS
from moegeom.studies.faults.score import Fault, believed, explaining, margin, rival

#: Share of the tokens with equally many weights of 0 where fewer experts are used than chosen.
_FEWER = 0.95

#: Left-over sets of which a fault removes this share may be spread in any way.
_MOST_REPAIRED = 0.8

#: The share of all disagreements that inputs have to account for, where B recorded its own.
_REPAIRS = 0.5

#: Sets that agree where routing weights are judged before anything else. Heuristic.
_AGREES = 0.99

#: Rows that hold what A chose, where slots are empty since experts were dropped. Heuristic.
_MOSTLY_DROPPED = 0.93

#: Sets that agree where weights are judged at all: of a stranger's choices some agree by chance.
_MOSTLY = 0.5

#: Flips that noise could not have made, before they are called a bug: one may be chance.
_BEYOND = 3

#: Noise on the inputs of a router beyond which it is not rounding: 5 % of their rms, 30 roundings
#: to bfloat16. Heuristic.
_MOST_NOISE = 0.05

#: Roundings to bfloat16 that other kernels leave on the inputs of the first router that differs:
#: nothing has flipped before it that could add to them. Heuristic.
_EARLY_ROUNDINGS = 8.0

#: Roundings to bfloat16 that a router's own arithmetic may be worth: of its input, of its rows, of
#: its logits. Inputs that are alike by this factor do not carry more. Heuristic.
_OWN_ROUNDINGS, _MUCH_LESS = 3.0, 4.0

#: Flips below which B's inputs are not called rounded: fewer may follow by chance. Heuristic.
_SOME_FLIPS = 2

#: Mean difference of log-probabilities, in nats, that arithmetic leaves. Heuristic.
_LOG_PROB_NOISE = 0.05

#: Tokens that never flip differ this much as the others do: flipping is not what matters.
_ALIKE, _UNRELATED = 0.5, 0.1

#: Sets that overlap beyond chance by less than these shares of what equal sets would, as they are
#: and with B's experts numbered as fits best (which fits chance too), are unrelated; with as many
#: tokens at least. Heuristic.
_CHANCE, _CHANCE_RENAMED, _ENOUGH = 0.05, 0.25, 64

#: Relative error of routing weights that are stored in bfloat16, with room for the scores' own;
#: and what small noise on the inputs leaves of them.
_SAME_WEIGHTS, _NOISY_WEIGHTS = 2.0**-6, 2.0**-4

#: Choices that B's own logits may leave, since they are recorded in a coarser format. Heuristic.
_RULED = 0.02

#: Share of what differs in values that other rows foretell where it is no noise. Heuristic.
_SYSTEMATIC = 0.1

#: Tokens that differ at a router where a change of rows would be found by their sets, and by the
#: values beside them; share of the sets from which an explanation is near, and that of the values
#: which other rows foretell where these differ. Heuristic.
_TELLING, _TOLD_BY_VALUES, _NEARLY, _LINEAR = 100, 30, 0.25, 0.9

#: What another rule leaves of the error of some tokens where it is theirs. Heuristic.
_CLEARLY = 0.125


def verdict(case: Evidence) -> CauseVerdict:
    """The explanation with the largest margin; else what can be said without one."""
    cause = _empty_slots(case) or _no_disagreement(case) or _best(case)
    if cause is None:
        opened = (rule(case) for rule in _OPEN)
        cause = next((one for one in opened if one is not None), None)
    cause = cause or CauseVerdict("inconclusive", f"{_share(case)} {_unexplained(case)}")
    return _of_another(case, _beside_c(case, cause))


def _empty_slots(case: Evidence) -> CauseVerdict | None:
    """Slots that hold no expert: what was written is no choice of a router alone."""
    layer = next((one for one in case.layers if one.empty and one.empty.is_written), None)
    if layer is None or layer.empty is None:
        return None
    empty, place = layer.empty, case.place(layer.router)
    some = f"in {place} {number_of(empty.num_tokens, 'row')}{_in(empty.where)}"
    lack = f"{some} lack experts"
    if empty.is_below:
        detail = f"{lack}, those of the lowest scores: a maximum that begins too high."
        return CauseVerdict("rule differs", detail, layer.router)
    # another fault may be why the others differ
    if empty.agreement < _MOSTLY_DROPPED and believed(case.faults) is None:
        return CauseVerdict("rule differs", f"{lack}; {_experts_choose(empty)}", layer.router)
    if empty.num_whole >= _MOSTLY * empty.num_tokens:
        detail = f"{some} hold one number in every slot, which is no choice: nothing was written."
        return CauseVerdict("padding counted", detail, layer.router)
    detail = f"{lack}; what they hold, A chose too ({_percent(empty.agreement)} of all rows)."
    return CauseVerdict("capacity", detail, layer.router)


def _experts_choose(empty: EmptySlots) -> str:
    """Rows lack experts, and what they hold is not what A chose."""
    return (
        f"what rows hold, A chose in {_percent(empty.agreement)} only: tokens with different "
        "numbers of experts, as where each expert takes its best tokens."
    )


def _best(case: Evidence) -> CauseVerdict | None:
    """Of all explanations, of sets and of weights, the one that saves most bits."""
    fault, layers = _fault(case), case.layers
    if fault is None and (of_chance := _unrelated(case)) is not None:
        # sets that are equal by chance say nothing of weights
        names = [layer.router for layer in layers]
        layers = layers[: names.index(of_chance.router)]
    weights = [one for layer in layers if (one := _wrong_weights(case, layer)) is not None]
    causes = [one for one in (fault, *weights) if one is not None]
    named = [one for one in causes if one.cause != "inconclusive"]
    return max(named or causes, key=lambda one: one.margin or 0.0, default=None)


def _beside_c(case: Evidence, cause: CauseVerdict) -> CauseVerdict:
    """How much of what differs the routers of the other checkpoint explain, which is a model."""
    if not case.against or cause.cause in ("no disagreement", "arithmetic noise only"):
        return cause
    of_c = [one for one in case.faults if one.of_other and one.bits > 0.0]
    if not of_c:
        return dataclasses.replace(cause, detail=f"{cause.detail} C's routers explain none of it.")
    best = max(of_c, key=lambda one: one.repaired)
    if best.repaired >= _AGREES and best.name in cause.faults:
        return cause  # that is what it says
    part = f"{_percent(max(best.repaired, 0.0))} of what differs in {case.place(best.router)}"
    rest = "" if best.repaired >= _AGREES else "; the rest may be the rest of that model"
    text = f"C's routers explain {part}{rest}."
    return dataclasses.replace(cause, detail=f"{cause.detail} {text}")


def _of_another(case: Evidence, cause: CauseVerdict) -> CauseVerdict:
    """Where B's recording names other routers than A's, that comes first."""
    if not case.is_of_another or cause.cause in ("no disagreement", "router stale"):
        return cause
    word = f" ({cause.cause})" if cause.faults else ""
    name = "another checkpoint"
    return dataclasses.replace(cause, cause=name, detail=f"{cause.detail}{word}")


def _no_disagreement(case: Evidence) -> CauseVerdict | None:
    if any(layer.agreement < 1.0 for layer in case.layers):
        return None
    if case.num_examined < _ENOUGH:
        matched = f"The {number_of(case.num_examined, 'token')} that are matched agree"
        few = f"{matched}; fewer than {_ENOUGH} say little."
        return CauseVerdict("inconclusive", few)
    cause = _best(case) or _outlying_weights(case) or _elsewhere(case, "")
    return cause or CauseVerdict("no disagreement", "")


def _wrong_weights(case: Evidence, layer: LayerEvidence) -> CauseVerdict | None:
    """Weights of one router that another rule explains where both choose the same experts."""
    rule = layer.weights
    if rule is None:
        return None
    off = rule.outlying_error if rule.outlying > 0.0 else rule.error
    if off <= _SAME_WEIGHTS:
        return None
    until = case.layers[: case.layers.index(layer) + 1]
    is_first = all(one.agreement >= _AGREES for one in until)
    place, cause = case.place(layer.router), "routing weights differ"
    if rule.zeros > 0.0:
        detail = (
            f"from {place} on {_percent(rule.zeros)} of the chosen experts have weight 0, which "
            f"the rule never gives{_in(rule.where)}"
        )
        fewer = rule.zeros_last >= _FEWER
        if layer.empty and layer.empty.agreement < _MOSTLY_DROPPED and not fewer:
            detail = f"{detail}; {_experts_choose(layer.empty)}"
            return CauseVerdict("rule differs", detail, layer.router, margin=rule.bits)
        detail += ": in each token the last ones, fewer are used than chosen." if fewer else "."
        return CauseVerdict(cause if fewer else "capacity", detail, layer.router, margin=rule.bits)
    where = f"from {place} on weights differ by {rule.error:.2g}, relative{_in(rule.where)}"
    if rule.outlying > 0.0:
        where += f", those of {_percent(rule.outlying)} of the tokens much more than the others"
    if rule.with_bias is not None and rule.with_bias <= _SAME_WEIGHTS:
        detail = f"{where}; with the selection bias in the scores by {rule.with_bias:.1g}."
        return CauseVerdict("bias in routing weights", detail, layer.router, margin=rule.bits)
    if off <= _NOISY_WEIGHTS and rule.nearest_error > _SAME_WEIGHTS:
        return None
    # tokens that read something else have other weights by the same rule
    is_clear = rule.nearest_error <= _CLEARLY * off and layer.agreement >= _MOSTLY
    if not (is_clear or (is_first and (case.inputs_of == "B" or rule.outlying == 0.0))):
        return None
    near = f"B's are {rule.nearest}, up to {rule.nearest_error:.1g}"
    if rule.nearest_error > _NOISY_WEIGHTS and case.inputs_of == "A":
        detail = (
            f"{where}; no rule that was tried explains it (nearest: {rule.nearest}), and what "
            "B's router read was not recorded: it may be that which differs."
        )
        return CauseVerdict("inconclusive", detail, layer.router)
    if rule.nearest_error > _NOISY_WEIGHTS:
        near = f"no rule that was tried explains it (nearest: {rule.nearest})"
    return CauseVerdict(cause, f"{where}; {near}.", layer.router, margin=rule.bits)


def _in(scope: str) -> str:
    return f", in {scope}" if scope else ""


def _outlying_weights(case: Evidence) -> CauseVerdict | None:
    """Outlying weights of some tokens, where B's inputs reproduce those of most."""
    for layer in case.layers:
        rule = layer.weights
        if rule is None or rule.outlying == 0.0 or case.inputs_of == "A":
            continue
        if layer.reproduced == 1.0:  # else it may be the router that gives them
            detail = (
                f"in {case.place(layer.router)} the weights of {_percent(rule.outlying)} of the "
                f"tokens{_in(rule.where)} are not those that B's own inputs give; those of the "
                "others are."
            )
            return CauseVerdict("routing weights differ", detail, layer.router)
    return None


def _fault(case: Evidence) -> CauseVerdict | None:
    """The leading fault on its scope; inconclusive where a rival fits as well."""
    candidates = explaining(case.faults)
    if not candidates:
        return None
    best = candidates[0]
    names = [layer.router for layer in case.layers]
    earlier = case.layers[: names.index(best.router)]
    if any(_is_beyond(layer) for layer in earlier):
        return None  # what begins there is not explained; later routers inherit it
    other = rival(best, case.faults)
    if believed(case.faults) is None:
        assert other is not None
        return CauseVerdict(
            "inconclusive",
            f"{_share(case)} Two causes fit alike: {_named(best)} ({best.cause}, {best.bits:,.0f} "
            f"bits) and {_named(other)} ({other.cause}, {other.bits:,.0f} bits).",
            best.router,
            (best.name, other.name),
            margin(best, other),
        )
    where = case.place(best.router)
    left = _second(case, best)
    if not left and case.inputs_of == "B" and not best.is_estimate:
        left = " B's own inputs are routed: they leave little room for noise."
    if left and best.repaired < _MOST_REPAIRED:
        part = f"{_percent(best.repaired)} of what differs in {where}"
        detail = f"{_share(case)} {_named(best)} ({best.cause}) would explain {part}.{left}"
        return CauseVerdict("inconclusive", detail, best.router, (best.name,), margin(best, other))
    begins = "the first layer" if not earlier else f"{where}, before which nothing does"
    gives = f"gives {_percent(best.reproduced[best.router])} of B's choices in {where}, without it "
    gives += _percent(best.before[best.router])
    if other is not None and best.router in other.reproduced:
        gives += f"; the next best cause, {_named(other)}, "
        gives += _percent(other.reproduced[best.router])
    return CauseVerdict(
        best.cause,
        f"{_named(best)}: {gives}. Begins in {begins}; explains {len(best.routers)} of "
        f"{number_of(len(case.layers), 'layer')}.{_second(case, best)}",
        best.router,
        (best.name,),
        margin(best, other),
    )


def _second(case: Evidence, best: Fault) -> str:
    """Flips that the fault leaves and that are not spread as noise."""
    odd = case.spread.uneven
    if not odd or best.router not in case.spread.routers:
        return ""
    if best.cause == "unrelated" or best.is_estimate:
        return ""  # what is left is chance, or the error of the estimate, spread in any way
    return f" What still differs is not spread as noise is: {odd[0].text}."


def _named(fault: Fault) -> str:
    """An operator with its scope."""
    return f"{fault.text}{_in(fault.region.text)}"


def _is_beyond(layer: LayerEvidence) -> bool:
    """Whether flips are there that noise cannot make, more than A's own choices leave."""
    noise = layer.noise
    own = (1.0 - layer.own_reproduced) * layer.num_routed
    return noise is not None and noise.num_beyond >= max(_BEYOND, 2.0 * own)


def _unrelated(case: Evidence) -> CauseVerdict | None:
    """The first router, or tokens of it, whose sets overlap by chance, if all before it agree."""
    if case.num_examined < _ENOUGH:
        return None
    there = case.differing
    if any((layer.by_own_logits or 0.0) > 1.0 - _RULED for layer in case.layers):
        return None  # B's logits give its choices: what makes these differs, by tokens or rows
    if there and there.text and there.num_tokens >= _ENOUGH and there.beyond_chance <= _CHANCE:
        overlap = "There sets overlap no more than those of two dice."
        return CauseVerdict("unrelated", f"{_share(case)} {overlap}", there.router)
    for number, layer in enumerate(case.layers):
        if layer.beyond_chance > _CHANCE or layer.beyond_chance_renamed > _CHANCE_RENAMED:
            if layer.agreement < _AGREES:
                return None
            continue
        rest = case.layers[number:]
        others = [one for one in rest if one.beyond_chance > _CHANCE]
        where = "in any layer" if not number and not others else f"in {case.place(layer.router)}"
        overlap = (
            "Sets overlap no more than those of two dice: by "
            f"{_percent(max(layer.beyond_chance, 0.0))} of what equal sets would, {where}."
        )
        return CauseVerdict("unrelated", f"{_share(case)} {overlap}", layer.router)
    return None


def _by_own_logits(case: Evidence) -> CauseVerdict | None:
    """Choices that A's rule does not make of the logits that B recorded beside them."""
    for layer in case.layers:
        share = layer.by_own_logits
        if share is None or share > 1.0 - _RULED or layer.own_reproduced <= 1.0 - _RULED:
            continue
        if _is_beyond(layer) or (case.differing and case.differing.text):
            return None  # what was written may be that of other tokens
        detail = (
            f"{_share(case)} In {case.place(layer.router)} A's rule gives {_percent(share)} of B's "
            "choices from the logits that B recorded beside them: what differs comes behind logits."
        )
        return CauseVerdict("rule differs", detail, layer.router)
    return None


def _between(case: Evidence) -> CauseVerdict | None:
    """A later router whose choices nothing that was tried foretells from what A's read: what stands
    between the routers changed that.
    """
    for layer, before in zip(case.layers[1:], case.layers, strict=False):
        if before.agreement < _AGREES or case.inputs_of == "B":
            return None
        flips = round((1.0 - layer.agreement) * layer.num_clean)
        noise = layer.noise
        if not flips or noise is None:
            continue
        share = layer.foretold
        near = [one for one in case.faults if one.router == layer.router and share is None]
        nearly = any(one.mended >= _NEARLY for one in near)
        some = bool(case.differing and case.differing.experts)
        ruled = layer.by_own_logits is None or layer.by_own_logits >= 1.0 - _RULED
        if nearly or some or not ruled or noise.roundings <= _EARLY_ROUNDINGS:
            return None
        if flips < (_TELLING if share is None else _TOLD_BY_VALUES):
            return None
        if share is not None and share >= _LINEAR:
            return None
        odd = bool(case.spread.uneven or (case.differing and case.differing.text))
        if not odd and (share or 0.0) < _SYSTEMATIC:
            return None  # noise at random may be that of its logits
        values = ""
        if share is not None:
            part = _percent(max(share, 0.0))
            values = f" (other rows foretell {part} of what differs in B's values)"
        begins = case.place(before.router)
        detail = (
            f"{_share(case)} {begins[:1].upper()}{begins[1:]} agrees; in "
            f"{case.place(layer.router)} {number_of(flips, 'token')} that agreed before differ, "
            f"and no rows, bias or rule foretell them from what A's router reads{values}: look at "
            "experts, attention and norm between the two."
        )
        return CauseVerdict("not the router", detail, layer.router)
    return None


def _innocent(case: Evidence) -> CauseVerdict | None:
    """B's inputs through A's router give B's choices: the inputs differ, not the router."""
    if case.inputs_of == "A":
        return None
    if any(not layer.num_routed for layer in case.layers):
        return None
    left = sum(1.0 - layer.reproduced for layer in case.layers)
    differ = sum(1.0 - layer.agreement for layer in case.layers)
    if left > (1.0 - _REPAIRS) * differ:
        return None
    sizes = [layer.inputs.size for layer in case.layers if layer.inputs is not None]
    reproduced = _percent(1.0 - left / len(case.layers))
    own = f"the router of A gives {reproduced} of B's choices on B's inputs"
    if not sizes:
        return CauseVerdict("not the router", f"{own}.")
    most = max(sizes)
    differs = f"{own}; inputs differ by up to {_percent(most)} of their rms"
    if most > _MOST_NOISE:
        begins = next(one for one in case.layers if one.inputs and one.inputs.size > _MOST_NOISE)
        return _upstream(case, begins, f"{differs}, more than rounding does.")
    if (cause := _changed_inputs(case, own)) is not None:
        return cause
    return _elsewhere(case, differs) or CauseVerdict("arithmetic noise only", f"{differs}.")


def _changed_inputs(case: Evidence, own: str) -> CauseVerdict | None:
    """Inputs that were rounded, or that differ by much more for some tokens than for the others."""
    flips = sum((1.0 - layer.agreement) * layer.num_tokens for layer in case.layers)
    for layer in case.layers:
        inputs, where = layer.inputs, case.place(layer.router)
        if inputs is None:
            continue
        # numbers that the recording alone rounded would not give every one of B's choices
        if inputs.rounded_to and layer.reproduced == 1.0 and flips >= _SOME_FLIPS:
            detail = (
                f"{own}; in {where} they hold numbers of {inputs.rounded_to} alone, A's do not."
            )
            return CauseVerdict("inputs rounded", detail, layer.router)
        # behind a flip inputs differ by much anyway, and attention carries it to other tokens
        if inputs.far_share > 0.0 and layer.num_clean == layer.num_tokens:
            scope = f", in {inputs.far_where}" if inputs.far_where else ""
            detail = (
                f"{own}; in {where} the inputs of {_percent(inputs.far_share)} of the tokens that "
                f"agreed before differ {inputs.far_times:.2g} times as much as those of the median "
                f"one{scope}: rounding does not choose its tokens."
            )
            return _upstream(case, layer, detail)
    return None


def _upstream(case: Evidence, begins: LayerEvidence, detail: str) -> CauseVerdict:
    """Not the router, unless weights that nobody recorded may have changed what it reads."""
    before = case.layers[: case.layers.index(begins)]
    unknown = [one for one in before if one.weights is None]
    if not unknown:
        return CauseVerdict("not the router", detail, begins.router)
    where = case.place(begins.router)
    weights = (
        f"It begins in {where}, behind {number_of(len(unknown), 'router')} whose routing weights B "
        "did not record: these, experts or attention changed what it reads."
    )
    return CauseVerdict("inconclusive", f"{detail} {weights}", begins.router)


def _beyond_noise(case: Evidence) -> CauseVerdict | None:
    for layer in case.layers:
        noise = layer.noise
        if noise is not None and _is_beyond(layer):
            detail = (
                f"{_share(case)} In {case.place(layer.router)} "
                f"{number_of(noise.num_beyond, 'token')} that "
                f"agreed before flip further from a boundary than noise of {_percent(noise.scale)} "
                f"of the input, which fits the others, can move them. {_unexplained(case)}"
            )
            return CauseVerdict("beyond noise", detail, layer.router)
    return None


def _at_the_router(case: Evidence) -> CauseVerdict | None:
    """Recorded inputs of A and B too close to explain B's other choices: the router differs."""
    for layer in case.layers:
        noise, inputs = layer.noise, layer.inputs
        if noise is None or inputs is None or noise.roundings <= _OWN_ROUNDINGS:
            continue
        if inputs.size < noise.scale / _MUCH_LESS:
            detail = (
                f"{_share(case)} In {case.place(layer.router)} it takes noise of "
                f"{_percent(noise.scale)} of the input ({noise.roundings:.2g} roundings to "
                f"bfloat16) to make as many, and the recorded inputs of A and B differ by "
                f"{_percent(inputs.size)}: what differs is B's router. {_unexplained(case)}"
            )
            return CauseVerdict("beyond noise", detail, layer.router)
    return None


def _noise(case: Evidence) -> CauseVerdict | None:
    noises = [(layer.router, layer.noise) for layer in case.layers if layer.noise is not None]
    if not noises:
        return None
    router, most = max(noises, key=lambda pair: pair[1].scale)
    size = f"{_percent(most.scale)} of the input ({most.roundings:.2g} roundings to bfloat16)"
    text = f"{_share(case)} Noise of up to {size}, in {case.place(router)}, makes as many"
    if most.scale > 1.0:
        alone = f"In {case.place(router)} B's choices have nothing to do with A's router."
        detail = f"{_share(case)} {alone} {_unexplained(case)}"
        return _elsewhere(case, detail) or CauseVerdict("inconclusive", detail, router)
    if most.scale > _MOST_NOISE:
        # choices alone cannot tell noise that large from a router that was changed as much
        detail = (
            f"{text}, which is more than rounding leaves; so would another router. "
            f"{_unexplained(case)}"
        )
        return _elsewhere(case, text) or CauseVerdict("inconclusive", detail)
    begins = next(layer for layer in case.layers if layer.agreement < 1.0)
    early = begins.noise
    if early is not None and early.roundings > _EARLY_ROUNDINGS and case.inputs_of == "A":
        detail = (
            f"{_share(case)} In {case.place(begins.router)}, before which nothing differs, it "
            f"takes noise of {_percent(early.scale)} of the input ({early.roundings:.2g} roundings "
            "to bfloat16) to make as many: more than kernels leave there. "
            f"{_unexplained(case)} What the router reads may have been changed before it."
        )
        return _elsewhere(case, text) or CauseVerdict("inconclusive", detail, begins.router)
    return _elsewhere(case, text) or _only_noise(case, f"{text}.")


def _not_spread(case: Evidence) -> CauseVerdict | None:
    """Flips that are not spread as noise and that no fault explains."""
    odd = case.spread.uneven
    if not odd:
        return None
    router = case.spread.routers[0]
    oddities = "; ".join(one.text for one in odd)
    return CauseVerdict(
        "inconclusive",
        f"{_share(case)} From {case.place(router)} on what differs is not spread as noise is: "
        f"{oddities}. {_unexplained(case)}",
        router,
    )


def _only_noise(case: Evidence, text: str) -> CauseVerdict:
    """Arithmetic noise, if every fault could be tried; else inconclusive."""
    if any(not layer.num_routed for layer in case.layers):
        return CauseVerdict(
            "inconclusive", f"{text} {_unexplained(case)} Not every layer could be tried."
        )
    if case.differing and (case.differing.experts or case.differing.text):
        some = "What differs is not spread as noise is."
        return CauseVerdict("inconclusive", f"{text} {some} {_unexplained(case)}")
    if not case.spread.is_tested:
        few = number_of(case.spread.num_flips, "flip is", "flips are")
        return CauseVerdict("inconclusive", f"{text} {few} too few to tell how they are spread.")
    even = f"What differs is spread as noise is (level {LEVEL:g} over {NUM_TESTS} tests)."
    return CauseVerdict("arithmetic noise only", f"{text} {even} {_unexplained(case)}")


def _elsewhere(case: Evidence, text: str) -> CauseVerdict | None:
    """Log-probabilities that differ where no expert flipped."""
    joined = case.log_probs
    if joined is None or joined.mean <= _LOG_PROB_NOISE:
        return None
    apart = f"log-probs differ by {joined.mean:.2g} nats in the mean"
    if joined.unflipped is not None and joined.unflipped >= _ALIKE * (joined.flipped or 0.0):
        detail = f"{apart}, by {joined.unflipped:.2g} where no expert flipped"
    elif joined.unflipped is None and abs(joined.correlation or 0.0) < _UNRELATED:
        detail = f"{apart}, whether few or many layers flipped"
    else:
        return None
    return CauseVerdict("not the router", f"{text}{'; ' if text else ''}{detail}.")


def _unexplained(case: Evidence) -> str:
    if not case.num_tried:
        return "Nothing was tried."
    return f"None of the {case.num_tried} operators that were tried explains it."


def _share(case: Evidence) -> str:
    """How much differs, and where."""
    mean = float(np.mean([1.0 - layer.agreement for layer in case.layers]))
    begins = next((one for one in case.layers if one.agreement < 1.0), case.layers[0])
    place = f"from {case.place(begins.router)} on" if begins != case.layers[0] else "in all layers"
    if case.layers[-1].agreement == 1.0:
        apart = [one.router for one in case.layers if one.agreement < 1.0]
        place = f"in {case.summary.places(apart)}"
    most = f", {case.differing.text}" if case.differing and case.differing.text else ""
    return (
        f"A and B choose differently in {_percent(mean)} of (token, layer) pairs, {place}{most}; "
        f"{_percent(case.any_share)} of tokens differ somewhere."
    )


def _percent(share: float) -> str:
    return percent_of_all(share) if 0.99 < share < 1.0 else percent(share)


#: What can be said where nothing explains what differs, in the order in which it is asked.
_OPEN: tuple[Callable[[Evidence], CauseVerdict | None], ...] = (
    _outlying_weights,
    _innocent,
    _unrelated,
    _by_own_logits,
    _between,
    _beyond_noise,
    _at_the_router,
    _not_spread,
    _noise,
)
