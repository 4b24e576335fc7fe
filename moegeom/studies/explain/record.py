"""What explains the disagreement of two runs: evidence by layer, and one verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moegeom.core.errors import InternalError
from moegeom.core.finding import EXIT_INCONCLUSIVE, EXIT_OK
from moegeom.core.option import argument, option
from moegeom.document.summary import Summary
from moegeom.engine.request import CHECKPOINT, RunBTerms, TokensRequest
from moegeom.studies.faults.exchangeable import Spread
from moegeom.studies.faults.operator import Cause
from moegeom.studies.faults.scope import Fault
from moegeom.studies.log_probs import LOG_PROBS, LogProbs


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(TokensRequest, RunBTerms):
    """What was asked for: A is ``tokens`` through ``checkpoint``, B is ``run_b``.

    ``map_b`` says which array of B is which router; ``checkpoint_b`` is a checkpoint that B may
    have loaded instead, ``log_probs`` a file of log-probabilities of both. With ``experts`` those
    of A are read, for what flips do to the output; more than 2 GB with ``yes`` only.
    """

    checkpoint: str = argument(f"What A ran: {CHECKPOINT}.")
    _: dataclasses.KW_ONLY
    checkpoint_b: str | None = option("Checkpoint that B may have loaded instead.")
    log_probs: Path | None = option(LOG_PROBS)
    experts: bool = option("Read the experts: how far flips move their output.", False)
    yes: bool = option("Read more than 2 GB of experts.", False)


#: The closed list of verdicts, what each means, and what to do about it.
VERDICTS: Mapping[str, tuple[str, str]] = {
    "no disagreement": ("A and B choose the same experts for every token.", ""),
    "arithmetic noise only": (
        "small noise on router inputs flips as many, and nothing on the list explains B better.",
        "more precision before the router, or replay, which hides it; other causes stay possible.",
    ),
    "weights rounded": (
        "B's router weights are rounded.",
        "send and keep routers in the precision they are trained in; replay only hides this.",
    ),
    "inputs rounded": (
        "what B's router reads is rounded.",
        "keep router inputs in float32, or accept the exposure (moegeom boundary-report).",
    ),
    "logits rounded": (
        "B rounds its logits or scores before the choice.",
        "have the engine keep router logits in float32 until the choice is made.",
    ),
    "bias rounded": (
        "B rounds the selection bias, or the sum of score and bias.",
        "keep the bias and that sum in float32; moegeom check says what the cast costs (MGN112).",
    ),
    "bias missing": (
        "B routes without the bias.",
        "look at how B loads the bias: a missing or renamed tensor is zeros in many loaders.",
    ),
    "bias stale": (
        "B routes with the selection bias of the other checkpoint.",
        "its bias was not updated, or not sent: look at buffers in the weight sync.",
    ),
    "router stale": (
        "B routes with the router of the other checkpoint.",
        "its weights were not updated: look at the weight sync and at which revision was loaded.",
    ),
    "gain not folded": (
        "B's router and the gain of the norm in front of it do not belong together.",
        "fold the gain into the router, or leave both alone; moegeom signoff A B shows where.",
    ),
    "rule differs": (
        "B chooses by another rule.",
        "compare the rule of moegeom list routers with the code that B runs.",
    ),
    "bias differs": (
        "B routes with another bias than A's.",
        "compare the bias that B loaded with that of the checkpoint: name, dtype, update, sign.",
    ),
    "experts favoured otherwise": (
        "B favours some experts over others, of all tokens alike, as a bias would.",
        "look for what adds to scores: a bias, a balancing term, dropout or noise by expert.",
    ),
    "columns damaged": (
        "columns of B's router, or the same coordinates of what it reads, are not A's.",
        "look at slices, transposes, scales of blocks and rotations: moegeom diff A B shows them.",
    ),
    "rows of another layer": (
        "B's router holds the rows of another layer.",
        "look at how B counts layers when it loads: dense layers, stages of a pipeline.",
    ),
    "rows damaged": (
        "rows of B's router are not those that were stored.",
        "look at how B slices, copies and converts the router: moegeom diff A B shows the rows.",
    ),
    "inputs differ": (
        "B's router reads something else.",
        "look at what stands in front of the router: norm, residual, layer.",
    ),
    "ties broken by number": (
        "B's scores lean to low or high numbers of experts: a tie-break that outgrew the ties.",
        "break ties by comparing, not by adding a small number to each score.",
    ),
    "rows repeated": (
        "rows of B hold the choices of the token before once more.",
        "look at buffers that are not written for every token: chunk borders, padded rows.",
    ),
    "experts renamed": (
        "B numbers its experts otherwise.",
        "logical ids are needed on both sides: record them with expert load balancing off.",
    ),
    "tokens shifted": (
        "B's rows belong to other tokens.",
        "shift them in whatever joins the two; engines never route the last token.",
    ),
    "layers shifted": (
        "B's columns belong to other layers.",
        "dense layers or a draft layer are counted on one side only.",
    ),
    "padding counted": (
        "rows of B that are no tokens are counted as choices.",
        "cut them off by the length of each sequence before the ids are used.",
    ),
    "bias in routing weights": (
        "B's routing weights contain the selection bias.",
        "weights are made of the scores without the bias.",
    ),
    "routing weights differ": (
        "where A and B choose alike, B weighs the chosen experts otherwise.",
        "look at renormalisation and the scaling factor of the weights.",
    ),
    "capacity": (
        "experts of B are full: what else chose them has no weight, or goes to the next best.",
        "raise the capacity factor of B, or drop nothing, before the two are compared.",
    ),
    "not the router": (
        "the router is not the cause.",
        "look at what comes before the router, at the experts and at the output layer.",
    ),
    "another checkpoint": (
        "B was recorded from another checkpoint: its routers have another fingerprint than A's.",
        "record B from the checkpoint of A.",
    ),
    "unrelated": (
        "what B chose has nothing to do with what A chose.",
        "look at whether B holds choices of this model at all, and of these tokens and layers.",
    ),
    "beyond noise": (
        "some of B's choices are further off than noise can carry, and nothing tried explains it.",
        "compare the weights (moegeom signoff A B); look at the tokens that are named.",
    ),
    "inconclusive": ("what is recorded cannot tell.", ""),
}


@dataclass(frozen=True)
class FlipNoise:
    """Noise on the input of one router, from what B chose otherwise.

    ``scale`` is its standard deviation over the rms of the input, of the median token, and
    ``spread`` that of the logarithm of the tokens' own; ``roundings`` is the scale in units of what
    rounding the input to bfloat16 does. Of tokens that agreed at all earlier routers the share
    ``observed`` flipped, and ``expected`` is what the noise flips. ``num_beyond`` are flips
    that it could not have made (probability below 1e-6), if more than its share; examples
    are (document, position).
    """

    scale: float
    spread: float
    roundings: float
    observed: float
    expected: float
    expected_error: float
    num_beyond: int
    examples: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class InputChange:
    """How the recorded inputs of A and B differ at one router.

    ``size`` is the rms over tokens of how far apart the inputs are, over their length: one token a
    thousand times as long as others weighs as much as they. ``rounded_to`` is a format whose
    numbers all of B's inputs are and A's are not. Of tokens that agreed at all earlier routers the
    share ``far_share`` differs more than 8 times as much as the median one, in the median
    ``far_times`` as much; ``far_where`` says which they are.
    """

    size: float
    rounded_to: str = ""
    far_share: float = 0.0
    far_times: float = 0.0
    far_where: str = ""


@dataclass(frozen=True)
class WeightRule:
    """Routing weights of B where both chose the same experts, against what a rule makes of them.

    Root mean square of the difference over that of the weights: by the rule of the checkpoint, with
    the bias in them, and by whichever other rule is nearest, which saves so many
    ``bits`` of them. ``zeros`` is the share of chosen experts that B gives no weight at all, and
    the rule does; ``zeros_last`` the share of tokens with some where these are the last that are
    chosen. ``outlying`` is the share of tokens whose weights are off 8 times as much as those of
    the median token, by ``outlying_error``, and ``where`` says which they are: if there are some,
    rules are held against these alone.
    """

    num_tokens: int
    error: float
    with_bias: float | None
    nearest: str
    nearest_error: float
    zeros: float = 0.0
    zeros_last: float = 0.0
    outlying: float = 0.0
    outlying_error: float = 0.0
    where: str = ""
    bits: float = 0.0


@dataclass(frozen=True)
class EmptySlots:
    """Slots in which B holds no expert, or one of no weight.

    Of ``num_tokens`` with some ``num_whole`` have no other; ``is_written`` where ids say so.
    ``agreement`` is that of the others that agreed before, empty slots filled by A's choices. With
    ``is_below`` they are those of scores below all that were chosen. ``where`` says which tokens.
    """

    num_tokens: int
    num_whole: int
    is_written: bool
    agreement: float
    is_below: bool
    where: str


@dataclass(frozen=True)
class LayerEvidence:
    """One router: how often A and B agree, and how often A's router gives B's sets.

    ``agreement`` is the share of ``num_tokens`` with equal sets; ``num_clean`` of them agreed at
    all earlier routers. ``beyond_chance`` is by how much sets overlap beyond chance, 1 for equal
    ones and 0 for those of two dice with the same loads; ``beyond_chance_renamed`` with B's experts
    numbered as fits best. ``reproduced`` is the share of ``num_routed`` tokens whose set is one
    that A's router admits for the inputs at hand, all but ``num_differ``; ``num_tried`` operators
    were tried. ``bits`` are those of B's sets for A's router with noise that fits. ``inputs`` is
    None unless both sides recorded them and rows could be tried. ``reason`` says why rows and
    inputs were not looked at. ``own_reproduced`` is the share of A's own recorded choices that A's
    router gives: what that leaves is no fault of B. ``by_own_logits`` is the share of B's choices
    that A's rule makes of the logits that B recorded. ``empty`` are slots without an expert, which
    count as those that A chose. ``foretold`` is the share of what differs in B's recorded values
    that other rows would foretell, None where nothing was to be told by it.
    """

    router: str
    num_tokens: int
    agreement: float
    num_clean: int
    num_routed: int
    num_tried: int
    num_differ: int
    reproduced: float
    bits: float
    num_renamed: int
    noise: FlipNoise | None
    weights: WeightRule | None
    inputs: InputChange | None = None
    reason: str = ""
    own_reproduced: float = 1.0
    beyond_chance: float = 1.0
    beyond_chance_renamed: float = 1.0
    by_own_logits: float | None = None
    empty: EmptySlots | None = None
    foretold: float | None = None


@dataclass(frozen=True)
class CauseVerdict:
    """One of the closed list; ``detail`` says where and by how much, ``router`` where it begins.

    ``faults`` are the names of what was found, ``margin`` the bits over what else could be meant.
    """

    cause: Cause
    detail: str
    router: str = ""
    faults: tuple[str, ...] = ()
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.cause not in VERDICTS:
            raise InternalError(f"'{self.cause}' is none of the {len(VERDICTS)} verdicts.")

    @property
    def meaning(self) -> str:
        return VERDICTS[self.cause][0]

    @property
    def remedy(self) -> str:
        return VERDICTS[self.cause][1]


@dataclass(frozen=True)
class OutputChange:
    """What flips do at one router: ``over_output`` is the mean length of the change of the output
    of the routed experts over that of the output, of ``num_looked`` of ``num_flipped`` tokens.

    ``share`` is the share of tokens that flip. None for what is not known, for ``reason``.
    """

    router: str
    num_flipped: int
    num_looked: int = 0
    over_output: float | None = None
    share: float = 0.0
    experts_read: int = 0
    expert_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Differing:
    """Where what differs is, at the first ``router`` where enough does: ``text`` names the tokens
    and the experts, empty for all; ``experts`` are those of which one takes part in nearly every
    set that differs, if they are few. The sets of the ``num_tokens`` tokens there overlap by so
    much beyond chance.
    """

    router: str
    text: str
    experts: tuple[int, ...]
    num_tokens: int
    beyond_chance: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a verdict follows from; ``run`` as in ``run.json``.

    Of ``num_matched`` tokens ``num_examined`` were compared. ``inputs_of`` is the side whose inputs
    were routed again; ``any_share`` the share of tokens that differ at some router. Noise is that
    which makes what the fault of the verdict leaves over. ``is_of_another`` where B's recording
    names the fingerprint of other routers. ``differing`` says which tokens and experts hold what
    differs, if not all. ``costs`` are there where experts were read, and
    ``harm`` where flips were made in A's model: by router what one costs the next tokens, in nats.
    """

    run: Mapping[str, Any]
    other: Mapping[str, Any]
    against: str = ""
    inputs_of: Literal["A", "B"]
    num_matched: int
    num_examined: int
    num_non_finite: int
    any_share: float
    layers: tuple[LayerEvidence, ...]
    faults: Sequence[Fault]
    spread: Spread
    log_probs: LogProbs | None
    not_looked_at: Sequence[str] = ()
    is_of_another: bool = False
    differing: Differing | None = None
    costs: tuple[OutputChange, ...] = ()
    harm: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        """The run with the names of the routers alone."""
        return Summary(self.run, [{"router": layer.router} for layer in self.layers], [], [], [])

    @property
    def missing(self) -> str:
        """What would tell more, of what was not given; empty where all was."""
        ways = {
            "name what else B may have loaded (--checkpoint-b)": not self.against,
            "record what B's routers read": self.inputs_of == "A",
        }
        return " or ".join(way for way, is_missing in ways.items() if is_missing)

    def place(self, router: str) -> str:
        """The name of a router in words."""
        return self.summary.places([router])

    @property
    def num_tried(self) -> int:
        """Operators with their parameters that were tried, at the router with the most."""
        return max((layer.num_tried for layer in self.layers), default=0)

    @property
    def nats_a_token(self) -> float | None:
        """What the flips cost each token if each costs ``harm`` and they add up."""
        flipped = {layer.router: 1.0 - layer.agreement for layer in self.layers}
        costs = [flipped[name] * nats for name, nats in self.harm.items() if name in flipped]
        return sum(costs) if costs else None

    @property
    def agreement(self) -> float:
        """Mean over routers of the share of equal sets."""
        return sum(layer.agreement for layer in self.layers) / len(self.layers)


@dataclass(frozen=True, kw_only=True)
class Explanation(Evidence):
    """The evidence, and the verdict that follows."""

    verdict: CauseVerdict

    @property
    def remedy(self) -> str:
        """The one thing to do next; never what was done."""
        own, more = self.verdict.remedy, self.missing
        if self.verdict.cause == "another checkpoint" and not self.against:
            return "record B from the checkpoint of A, or name the one that B ran (--checkpoint-b)."
        if own or self.verdict.cause != "inconclusive":
            return own
        return (
            f"{more}." if more else "compare the weights (moegeom diff A C) and the code of both."
        )

    @property
    def exit_code(self) -> int:
        """Inconclusive where the verdict is."""
        return EXIT_INCONCLUSIVE if self.verdict.cause == "inconclusive" else EXIT_OK
