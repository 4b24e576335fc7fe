"""Flips that are made in a running model, one at a time, and what its next tokens are then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moegeom.core.errors import RecordingError
from moegeom.core.shapes import Bool, Float64, Int32
from moegeom.engine.devices.resident import Tensors
from moegeom.engine.jumps import ExactRouter, token_ties, why_no_jumps
from moegeom.engine.prepared import prepare
from moegeom.geometry.whatif import same_sets
from moegeom.kernels.table import load_kernels
from moegeom.recorder.recorder import ModelTaps
from moegeom.recorder.taps import Identity, Place, as_array
from moegeom.tokens.recording.harm import LATER

#: Tokens of a document that are run again for each flip; flips are of these.
LENGTH = 256

#: Flips are of the tokens of a document that lie nearest to a boundary, this share of them.
NEAREST = 0.1

#: Numbers of logits in one pass: as many sequences go through together as give so many.
_LOGITS = 1 << 26

#: Steps across a boundary, in units of the distance to it: the mirror image, and as far as numbers
#: of the model's dtype need to show the step.
_STEPS = tuple(2.0**power for power in range(1, 13))


@dataclass(frozen=True, eq=False)
class _Flip:
    """One token at one router: what the gate is to read, and the set that it chooses then."""

    place: int
    token: int
    across: torch.Tensor
    beside: torch.Tensor
    after: Int32[np.ndarray, "k"]
    pair: Int32[np.ndarray, "2"]
    distance: float
    is_same_beside: bool


class _Gate:
    """Exchanges rows of what a gate reads; what its experts read stays."""

    def __init__(self, model: torch.nn.Module, place: Place) -> None:
        self.place, self.is_called = place, False
        self.rows: dict[int, torch.Tensor] = {}
        self._module = model.get_submodule(place.paths[0])

    def hook(self) -> Any:
        """Puts the hook on, in front of those that listen; its handle takes it off."""
        before = self._before
        return self._module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def _before(
        self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.is_called = True
        if not self.rows:
            return None
        values = [*arguments, *named.values()]
        width = self.place.router.hidden_size
        at = next(
            n
            for n, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (width,)
        )
        exchanged = values[at].detach().clone(memory_format=torch.contiguous_format)
        rows = exchanged.view(-1, width)
        for row, value in self.rows.items():
            rows[row] = value.to(rows)
        values[at] = exchanged
        first = len(arguments)
        return tuple(values[:first]), dict(zip(named, values[first:], strict=True))


class FlipMaker:
    """Makes flips in a model and collects what they cost, by router.

    A flip is made at the gate alone: one token's router input is moved across its nearest boundary,
    to its mirror image, and what the experts read stays. So the token meets another expert with the
    routing weights of the boundary. All tokens behind it see what it becomes. ``beside`` is the
    same step away from the boundary, which changes weights and no choice.

    Raises
    ------
    RecordingError
        When the model gives no logits of next tokens, or no gate of it can be moved.
    """

    def __init__(self, model: torch.nn.Module, identity: Identity, seed: int = 0) -> None:
        self._model, self._identity, self._seed = model, identity, seed
        self._gates = [_Gate(model, place) for place in identity.places]
        self._inputs: dict[str, torch.Tensor] = {}
        self._choices: dict[str, torch.Tensor | None] = {}
        routers = [place.router for place in identity.places]
        #: Why no flip is made at a router, by its name.
        self.reasons: dict[str, str] = {}
        for router in routers:
            if reason := why_no_jumps(router, Tensors(router.name).facts):
                self.reasons[router.name] = reason
        self._prepared = [prepare(router) for router in routers]
        self._columns: dict[str, list[Any]] = defaultdict(list)

    def columns(self) -> dict[str, list[Any]]:
        """What was collected, a row for each flip: see ``moegeom.tokens.recording.harm``."""
        return dict(self._columns)

    @torch.no_grad()
    def make(self, token_ids: Sequence[int], first_token: int, flips: int) -> int:
        """Makes up to ``flips`` flips at each router in the beginning of what is read at once.

        ``first_token`` is the number of its first token in the recording. Returns how many.
        """
        ids = torch.tensor([token_ids[:LENGTH]])
        ids = ids.to(next(self._model.parameters()).device)
        with ExitStack() as stack:
            for gate in self._gates:
                stack.callback(gate.hook().remove)
            for remove in ModelTaps(self._model, self._identity).hooks(self._listen):
                stack.callback(remove)
            before = self._logits(ids)
            together = max(_LOGITS // before.numel(), 1)
            made = list(self._planned(first_token, flips))
            for start in range(0, len(made), together):
                some = made[start : start + together]
                if len(before) != len(some):  # another shape may have other last bits
                    before = self._logits(ids.expand(len(some), -1))
                self._push(ids.expand(len(some), -1), some, before, first_token)
        return len(made)

    def _listen(self, name: str, inputs: torch.Tensor, chosen: torch.Tensor | None) -> None:
        self._inputs[name], self._choices[name] = inputs, chosen

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [sequences, tokens, vocabulary] of the next tokens."""
        self._inputs, self._choices = {}, {}
        logits = getattr(self._model(input_ids=ids, use_cache=False), "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape:
            raise RecordingError(
                "the model gives no logits of next tokens, so that nothing says what a flip costs.",
                "Leave out --flips, or load it with its language model head.",
            )
        return logits

    def _planned(self, first_token: int, flips: int) -> Iterator[_Flip]:
        """The flips that can be made of what the routers read just now."""
        for number, gate in enumerate(self._gates):
            router = gate.place.router
            inputs = self._inputs.get(router.name)
            if router.name in self.reasons or inputs is None:
                continue
            if not gate.is_called:
                self.reasons[router.name] = "its gate is no module that is called by itself"
                continue
            yield from self._at_router(
                number, inputs, np.random.default_rng([self._seed, number, first_token]), flips
            )

    def _at_router(
        self, place: int, inputs: torch.Tensor, random: np.random.Generator, flips: int
    ) -> Iterator[_Flip]:
        prepared = self._prepared[place]
        exact, read = ExactRouter(prepared.router), as_array(inputs)
        y = read.astype(np.float64)
        logits = exact.logits(y)
        chosen = exact.chosen(logits)
        kernels = load_kernels("cpu")
        ties = token_ties(prepared, y, logits.astype(np.float32), chosen, kernels)
        tie, pair, after = ties.tie, ties.pair, ties.after
        distance = np.where(tie.is_known, tie.distance, np.inf)
        near = np.argsort(distance, kind="stable")[: max(round(NEAREST * len(y)), 1)]
        near = near[np.isfinite(distance[near])]
        for row in random.permutation(near)[:flips].tolist():
            ends = _ends(exact, read[row], tie.point[row] - y[row], after[row])
            if ends is None:
                continue
            is_same = bool(_chooses(exact, ends[1:], chosen[row])[0])
            across, beside = map(torch.from_numpy, ends)
            of_flip = after[row], pair[row], float(distance[row])
            yield _Flip(place, row, across, beside, *of_flip, is_same)

    def _push(
        self, ids: torch.Tensor, flips: Sequence[_Flip], logits: torch.Tensor, first_token: int
    ) -> None:
        """Runs sequences with one flip each, and then those with the step back; ``logits`` are
        those of the same sequences without.
        """
        before = _rows(logits, flips)
        across, sets = self._outcome(ids, flips, [flip.across for flip in flips])
        beside, _ = self._outcome(ids, flips, [flip.beside for flip in flips])
        for number, flip in enumerate(flips):
            choice = sets[number]
            if choice is not None and set(choice.tolist()) != set(flip.after.tolist()):
                continue  # the model's own arithmetic has another mind so near to the boundary
            divergence = _divergence(before[number], across[number])
            control = np.nan
            if flip.is_same_beside:
                control = _divergence(before[number][:1], beside[number][:1]).item()
            top = [one[number][0].argmax().item() for one in (before, across)]
            row = {
                "router": self._gates[flip.place].place.router.name,
                "token": first_token + flip.token,
                "expert_out": int(flip.pair[0]),
                "expert_in": int(flip.pair[1]),
                "boundary_distance": flip.distance,
                "kl": divergence[0].item(),
                "kl_later": divergence[1:].sum().item(),
                "kl_beside": control,
                "is_other_token": top[0] != top[1],
            }
            for name, value in row.items():
                self._columns[name].append(value)

    def _outcome(
        self, ids: torch.Tensor, flips: Sequence[_Flip], read: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Int32[np.ndarray, "k"] | None]]:
        """Logits of each flipped token and those behind it, and the set that the model chose; each
        gate reads one of ``read``.
        """
        place = [number * ids.shape[1] + flip.token for number, flip in enumerate(flips)]
        for row, flip, value in zip(place, flips, read, strict=True):
            self._gates[flip.place].rows[row] = value
        try:
            logits = self._logits(ids)
        finally:
            for gate in self._gates:
                gate.rows = {}
        sets = []
        for number, flip in enumerate(flips):
            choice = self._choices[self._gates[flip.place].place.router.name]
            sets.append(None if choice is None else as_array(choice[place[number]].int()))
        return _rows(logits, flips), sets


def _rows(logits: torch.Tensor, flips: Sequence[_Flip]) -> list[torch.Tensor]:
    """Those of each flipped token and the ones behind it."""
    return [
        logits[number, flip.token : flip.token + 1 + LATER].clone()
        for number, flip in enumerate(flips)
    ]


def _ends(
    exact: ExactRouter,
    read: np.ndarray,
    to_boundary: Float64[np.ndarray, "hidden"],
    after: Int32[np.ndarray, "k"],
) -> Float64[np.ndarray, "2 hidden"] | None:
    """Ends of the shortest step whose end, rounded as the input is, has the set behind the
    boundary, and of the step back; None where no step has.
    """
    steps = np.outer((*_STEPS, *(-step for step in _STEPS)), to_boundary)
    ends = (read.astype(np.float64) + steps).astype(read.dtype).astype(np.float64)
    is_after = _chooses(exact, ends[: len(_STEPS)], after)
    first = int(np.argmax(is_after))
    return ends[[first, first + len(_STEPS)]] if is_after[first] else None


def _chooses(
    exact: ExactRouter, points: Float64[np.ndarray, "points hidden"], experts: np.ndarray
) -> Bool[np.ndarray, "points"]:
    choice = exact.chosen(exact.logits(points))
    return same_sets(choice, np.broadcast_to(experts, choice.shape))


def _divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """KL(before || after) in nats of rows of logits, in float64."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (before, after))
    return (p.exp() * (p - q)).sum(dim=-1).clamp_min(0.0)


def make_flips(
    model: torch.nn.Module,
    identity: Identity,
    pieces: Sequence[tuple[int, Sequence[int]]],
    flips: int,
    advanced: Callable[[int], None] | None = None,
) -> tuple[dict[str, list[Any]], Mapping[str, str]]:
    """About ``flips`` flips at each router, spread over pieces (number of the first token, ids).

    Returns columns with a row for each flip, and why routers have none.

    Raises
    ------
    RecordingError
        When no router has one.
    """
    maker = FlipMaker(model, identity)
    used = pieces[:: max(len(pieces) // flips, 1)][:flips]
    each = [flips // len(used) + (n < flips % len(used)) for n in range(len(used))]
    for (first_token, token_ids), number in zip(used, each, strict=True):
        made = maker.make(token_ids, first_token, number)
        if advanced:
            advanced(made)
    if not maker.columns():
        reasons = "; ".join(f"{name}: {why}" for name, why in maker.reasons.items())
        raise RecordingError(
            f"no flip could be made in the model ({reasons or 'no token is near a boundary'}).",
            "Leave out --flips.",
        )
    return maker.columns(), maker.reasons
