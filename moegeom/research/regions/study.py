"""``research regions``: how much of the non-linearity between tokens is routing?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RouterError, UsageError
from moegeom.core.router import Router, Rule
from moegeom.core.shapes import Bool, Float64, Int64
from moegeom.core.tokens import TokenSource
from moegeom.engine.jumps import ExactRouter
from moegeom.engine.plan import SAMPLE_TOKENS, SMALL_SAMPLE_TOKENS
from moegeom.engine.prepared import unavailable
from moegeom.engine.search_pace import SearchPace
from moegeom.engine.session import Session
from moegeom.geometry import region_counts
from moegeom.geometry.capacity import most_regions, published_regions
from moegeom.geometry.selection import SCORES
from moegeom.geometry.set_code import chosen_mask
from moegeom.pipeline import Watch
from moegeom.research.regions import STUDY
from moegeom.research.regions.record import (
    EarlierRegions,
    PlaneRegions,
    Regions,
    RegionsRequest,
    RouterRegions,
    SegmentRegions,
)
from moegeom.router.expert_tensors import ExpertTensors, open_experts
from moegeom.routing_cells.facet_graph import swaps
from moegeom.routing_cells.plane.segments import bracketed_changes
from moegeom.routing_cells.plane.subspace import Slice
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.slices import RequestedSlice, SliceTokens, frame_of, requested_slice
from moegeom.routing_cells.walk.enumeration import AllSubsets, enumerate_cells
from moegeom.routing_cells.walk.segment_crossings import crossing_rate, segment_crossings
from moegeom.studies.announced import announce_bytes
from moegeom.studies.study import each
from moegeom.studies.written import write_rows

# --------------------------------------------------------------------------------------- one router
#: Ways on which neurons of all experts are counted, products of numbers for those of one kind, and
#: ways at least and at most where no number is asked for, of rules whose changes are bracketed.
_WHOLE, _PRODUCTS, _FEWEST, _MOST, _MOST_CURVED = 16, 2**36, 64, 1000, 192

#: Numbers of inputs that a sample has where their tokens are more than a few.
_INPUTS = 2**23

#: Numbers of gates beyond which not all neurons are counted, where no plane needs them.
_NUMBERS = 2**30

#: Lines that are counted in all cells together, and cells at least.
_LINES, _FEWEST_CELLS = 2**18, 24

#: What regions are, by activation of experts without a gate; others are patterns of signs.
_KINDS = {"relu": "linear regions", "relu2": "polynomial regions"}


@dataclass(frozen=True, eq=False)
class Ways:
    """Ends of the straight ways of one kind."""

    way: str
    start: Float64[np.ndarray, "segments hidden"]
    stop: Float64[np.ndarray, "segments hidden"]


def ways_of(sample: SliceTokens, number: int, seed: int) -> list[Ways]:
    """Random pairs of tokens, no token in two, and tokens that follow each other in a document."""
    draw, tokens = np.random.default_rng(seed), len(sample.inputs)
    document, half = sample.document, min(number, tokens // 2)

    def way(name: str, start: np.ndarray, stop: np.ndarray) -> Ways:
        return Ways(name, *(sample.inputs[rows].astype(np.float64) for rows in (start, stop)))

    chosen = draw.permutation(tokens)[: 2 * half]
    ways = [way("random pairs", chosen[:half], chosen[half:])]
    follows = (np.diff(sample.token) == 1) & (document[1:] == document[:-1]) & (document[1:] >= 0)
    rows = np.flatnonzero(follows)
    if len(rows):
        rows = np.sort(draw.permutation(rows)[:number])
        ways.append(way("consecutive tokens", rows, rows + 1))
    return ways


def router_regions(
    router: Router,
    tensors: ExpertTensors,
    ways: list[Ways],
    requested: RequestedSlice | None,
    sample: SliceTokens,
    request: RegionsRequest,
    pace: SearchPace,
) -> RouterRegions:
    """Counts on every way and in the plane, if there is one; each gate is read once."""
    part = None if requested is None else requested.part
    if part is not None and part.dims != 2:
        raise _no_plane(request.subspace)
    pace.begin(f"{router.name} ways")
    on_ways = [_OnWays(router, tensors, one) for one in ways]
    pace.begin(f"{router.name} experts")
    lines, norms, draw = [], [], np.random.default_rng([request.seed, router.layer])
    most, num_bands = _bands_of(router.rule, tensors)
    wide = None if part is None else np.empty((tensors.width, tensors.hidden))
    for expert in pace.parts(range(tensors.num_experts), lambda _: 1, is_whole=True):
        bands = np.sort(draw.permutation(num_bands)[:most]).tolist()
        gate, bias = tensors.read_gate(expert, bands if most < num_bands else None)
        offset = np.zeros(len(gate)) if bias is None else bias.astype(np.float64)
        rows = [one.needed(expert) for one in on_ways]
        ends = [ends[some] for one, some in zip(on_ways, rows, strict=True) for ends in one.ends]
        # one product: each would read the gate again
        values = np.concatenate(ends) @ gate.astype(np.float32, copy=False).T
        of_ends = np.split(values, np.cumsum([len(end) for end in ends])[:-1])
        for one, some, start, stop in zip(on_ways, rows, of_ends[::2], of_ends[1::2], strict=True):
            one.add(expert, some, start + offset, stop + offset, most)
        if part is not None and wide is not None:
            wide[:] = gate
            lines.append(_on_plane(wide, offset, part))
            norms.append((np.sqrt(np.einsum("nd,nd->n", wide, wide)), offset))
    return RouterRegions(
        router=router.name,
        num_experts=router.num_experts,
        top_k=router.rule.top_k,
        width=tensors.width,
        num_counted=int(tensors.width * _share_of(router.rule, tensors)),
        activation=tensors.activation,
        counted="sign patterns of the gate" if tensors.is_gated else _KINDS.get(
            tensors.activation, "sign patterns of the pre-activations"
        ),
        num_bytes=int(tensors.bytes_of(gate_alone=True) * _share_of(router.rule, tensors)),
        ways=tuple(one.figures() for one in on_ways),
        plane=None
        if requested is None or part is None
        else _plane(router, lines, norms, requested, part, sample, request, pace),
    )  # fmt: skip


def _bands_of(rule: Rule, tensors: ExpertTensors) -> tuple[int, int]:
    """How many of the bands of each gate are counted, and are there: all where a plane needs them,
    else as many as so many numbers allow, and two at least, so that they have an error.
    """
    num_bands = 1 if rule.is_affine else tensors.gate_bands
    numbers = tensors.num_experts * tensors.width * tensors.hidden
    return max(
        min(num_bands, 2), min(num_bands, num_bands * _NUMBERS // max(numbers, 1))
    ), num_bands


def _share_of(rule: Rule, tensors: ExpertTensors) -> Fraction:
    """Which share of the neurons is counted."""
    return Fraction(*_bands_of(rule, tensors))


class _OnWays:
    """Changes on the ways of one kind, gathered expert by expert; where neurons are counted in some
    bands of the experts alone, ``times`` as many are there, and ``lost`` is the variance of that.
    """

    def __init__(self, router: Router, tensors: ExpertTensors, ways: Ways) -> None:
        self.width, self.times, self.lost = tensors.width, 1.0, 0.0
        self.ways, self.number = ways, len(ways.start)
        self.length = np.linalg.norm(ways.stop - ways.start, axis=1)
        self.ends = [ends.astype(np.float32) for ends in (ways.start, ways.stop)]
        exact, rule, bias = ExactRouter(router), router.rule, router.selection_bias
        logits = [exact.logits(ends) for ends in (ways.start, ways.stop)]
        if rule.is_affine:
            changes = segment_crossings(logits[0], logits[1], rule.top_k, with_places=True)
            self.unknown_share = 0.0
        else:
            added = None if bias is None else bias.astype(np.float64)
            changes = bracketed_changes(logits[0], logits[1], rule, added)
            self.unknown_share = float(changes.is_unknown.mean())
        self.first, self.at = changes.first, changes.at
        self.segment = np.repeat(np.arange(self.number), np.diff(self.first))
        owner, middle = _middles(self.first, self.at)
        inside = (1.0 - middle)[:, None] * logits[0][owner] + middle[:, None] * logits[1][owner]
        self.is_chosen: Bool[np.ndarray, "pieces experts"] = chosen_mask(
            exact.chosen(inside), router.num_experts
        )
        # where each expert is chosen at all; of the first ways all experts are looked at
        self.is_met = np.zeros((self.number, router.num_experts), bool)
        np.logical_or.at(self.is_met, owner, self.is_chosen)
        self.num_whole = min(self.number, _WHOLE)
        self.num_all = np.zeros(self.num_whole, np.int64)
        self.roots: list[tuple[np.ndarray, np.ndarray]] = []

    def needed(self, expert: int) -> Int64[np.ndarray, "some"]:
        """The ways on which the expert is chosen, and those on which all experts count."""
        is_needed = self.is_met[:, expert].copy()
        is_needed[: self.num_whole] = True
        return np.flatnonzero(is_needed)

    def add(
        self,
        expert: int,
        rows: Int64[np.ndarray, "some"],
        start: Float64[np.ndarray, "some neurons"],
        stop: Float64[np.ndarray, "some neurons"],
        bands: int,
    ) -> None:
        counted = start.shape[1]
        self.times = self.width / counted
        is_needed = np.zeros(self.number, bool)
        is_needed[rows] = True
        changes = np.diff(self.first)[rows]
        first = np.concatenate([[0], np.cumsum(changes)])
        among = np.repeat(is_needed, np.diff(self.first))
        pieces = np.repeat(is_needed, np.diff(self.first) + 1)
        chosen = np.ascontiguousarray(self.is_chosen[pieces, expert])
        roots = region_counts.segment_roots(start, stop, first, self.at[among], chosen)
        segment = rows[roots.segment]
        self.num_all += np.bincount(segment, minlength=self.number)[: self.num_whole]
        self.roots.append((segment[roots.is_active], roots.at[roots.is_active]))
        if self.times > 1.0:
            of_bands = roots.neuron[roots.is_active] // (counted // bands)
            by_band = np.bincount(of_bands, minlength=bands) / self.number
            self.lost += bands * self.times * (self.times - 1.0) * float(by_band.var(ddof=1))

    def figures(self) -> SegmentRegions:
        segment, at = (np.concatenate(part) for part in zip(*self.roots, strict=True))
        neurons = self.times * np.bincount(segment, minlength=self.number)
        changes = np.diff(self.first)
        all_segments, places = np.r_[segment, self.segment], np.r_[at, self.at]
        distinct = region_counts.distinct_places(all_segments, places, self.number)
        regions = 1 + changes + self.times * (distinct - changes)
        rate, rate_se = crossing_rate(regions - 1, self.length)
        rate_se = float(np.hypot(rate_se, np.sqrt(self.lost) / max(self.length.mean(), 1e-300)))

        def error(values: np.ndarray, lost: float = 0.0) -> float:
            few = self.number < 2
            return float("nan") if few else float(np.sqrt(values.var(ddof=1) / self.number + lost))

        return SegmentRegions(
            way=self.ways.way,
            num_segments=self.number,
            length=float(self.length.mean()),
            router_changes=float(changes.mean()),
            router_changes_se=error(changes),
            neuron_changes=float(neurons.mean()),
            neuron_changes_se=error(neurons, self.lost),
            regions=float(regions.mean()),
            regions_se=error(regions, self.lost),
            all_neurons=self.times * float(self.num_all.mean()),
            per_length=rate,
            per_length_se=rate_se,
            unknown_share=self.unknown_share,
        )


def _middles(
    first: Int64[np.ndarray, "bounds"], at: Float64[np.ndarray, "changes"]
) -> tuple[Int64[np.ndarray, "pieces"], Float64[np.ndarray, "pieces"]]:
    """The segment of each piece between changes, and the middle of the piece."""
    segments = len(first) - 1
    owner = np.repeat(np.arange(segments), np.diff(first) + 1)
    low = np.insert(at, first[:-1], 0.0)
    high = np.insert(at, first[1:], 1.0)
    return owner, 0.5 * (low + high)


# -------------------------------------------------------------------------------------------- plane
def _on_plane(rows: np.ndarray, offset: np.ndarray, part: Slice) -> Float64[np.ndarray, "lines 3"]:
    return np.column_stack([rows @ part.basis, rows @ part.centre + offset])


def _random_lines(
    lengths: Float64[np.ndarray, "neurons"],
    offset: Float64[np.ndarray, "neurons"],
    part: Slice,
    draw: np.random.Generator,
) -> Float64[np.ndarray, "lines 3"]:
    """The lines of rows of these lengths in random directions: the plane sees three of their
    coordinates, along its axes and its centre, and of all others their length.
    """
    hidden = len(part.centre)
    frame, triangle = np.linalg.qr(np.column_stack([part.basis, part.centre]))
    seen = draw.standard_normal((len(lengths), frame.shape[1]))
    square = (seen**2).sum(axis=1)
    if hidden > frame.shape[1]:
        square = square + draw.chisquare(hidden - frame.shape[1], len(lengths))
    values = (lengths / np.sqrt(square))[:, None] * seen @ triangle
    return np.column_stack([values[:, :2], values[:, 2] + offset])


def _plane(
    router: Router,
    lines: list[np.ndarray],
    norms: list[tuple[np.ndarray, np.ndarray]],
    requested: RequestedSlice,
    part: Slice,
    sample: SliceTokens,
    request: RegionsRequest,
    pace: SearchPace,
) -> PlaneRegions:
    k = router.rule.top_k
    points = part.coordinates(sample.inputs)
    x0, x1, y0, y1 = map(Fraction, frame_of(points, requested, sample, CellsRequest(""), 1.0))
    frame = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    pace.begin(f"{router.name} cells")
    polygons = list(_cells(router, part, frame))
    pace.begin(f"{router.name} regions")
    num_cells, draw = len(polygons), np.random.default_rng(request.seed)
    most = max(_FEWEST_CELLS, _LINES // (k * len(lines[0])))
    if num_cells > most:
        some = np.sort(draw.choice(num_cells, most, replace=False))
        polygons = [polygons[number] for number in some.tolist()]
    steps = pace.share(router.num_experts, len(polygons) * (1 + request.random_experts))

    def counted(of_experts: list[np.ndarray]) -> Iterator[int]:
        for experts, corners in polygons:
            cut = np.concatenate([of_experts[e] for e in experts])
            yield region_counts.regions_in_polygon(corners, cut)
            next(steps)

    of_cell, random = tuple(counted(lines)), []
    unwatched = dataclasses.replace(pace, watch=None)
    for _ in unwatched.parts(range(request.random_experts), lambda _: 1):
        neurons = [_random_lines(lengths, offset, part, draw) for lengths, offset in norms]
        random.append(sum(counted(neurons)))
    for _ in steps:  # draws that the budget left out
        pass
    width = len(lines[0])
    published = published_regions(router.num_experts, k, width, 2)
    return PlaneRegions(
        subspace=requested.text,
        variance_share=requested.variance_share,
        expert_sets=tuple(experts for experts, _ in polygons),
        of_cell=of_cell,
        bound=most_regions(router.num_experts, k, width, 2),
        top_1=published.top_1,
        top_k=published.top_k,
        random=tuple(random),
        num_cells=num_cells,
    )


def _cells(
    router: Router, part: Slice, frame: list[region_counts.Point]
) -> Iterator[tuple[tuple[int, ...], list[region_counts.Point]]]:
    """Each expert set with its cell inside the frame, exactly for the rounded rows."""
    bias = router.affine_bias
    weight, offset = part.instance(router.weight, bias)
    rows: list[region_counts.Line] = [
        (Fraction(a), Fraction(b), Fraction(c))
        for (a, b), c in zip(weight.tolist(), offset.tolist(), strict=True)
    ]
    cells = enumerate_cells(weight, offset, router.rule.top_k)
    pairs_of: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    if isinstance(cells, AllSubsets):
        every = range(router.num_experts)
        for experts in combinations(every, router.rule.top_k):
            pairs_of[experts] = list(product(experts, sorted(set(every) - set(experts))))
    else:
        sets = [tuple(experts) for experts in cells.expert_set.tolist()]
        pairs_of = {experts: [] for experts in sets}
        if len(cells.facets):
            out, into = swaps(cells.expert_set, cells.facets).first
            for (one, other), i, j in zip(cells.facets.tolist(), out, into, strict=True):
                pairs_of[sets[one]].append((int(i), int(j)))
                pairs_of[sets[other]].append((int(j), int(i)))
    for experts, pairs in pairs_of.items():
        sides: list[region_counts.Line] = [
            (rows[i][0] - rows[j][0], rows[i][1] - rows[j][1], rows[i][2] - rows[j][2])
            for i, j in pairs
        ]
        if corners := region_counts.clipped(frame, sides):
            yield experts, corners


def regions(request: RegionsRequest, watch: Watch | None = None) -> Regions:
    """Changes of the set and of neurons between tokens, and regions in a plane, router by router.

    Raises
    ------
    RouterError
        When the checkpoint has no experts, or they are stored in a way that is not known.
    RecordingError
        When the recording does not hold router inputs, or records none of the routers.
    UsageError
        Without tokens, when more than 2 GB are to be read without ``yes``, when no router has
        known choice between inputs, and when ``out`` cannot be written.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-balanced"
    >>> found = mg.regions(f"{sample}/step_1500", f"{sample}/rec/step_1500", layers=0)
    >>> [way.way for way in found.value.routers[0].ways]
    ['random pairs', 'consecutive tokens']
    """
    if request.segments is not None and request.segments < 2:
        raise UsageError(f"--segments {request.segments}: expected 2 or more.")
    _refuse_no_plane(request.subspace)
    opened, source = STUDY.open(request)
    reasons = {router.name: _why_not(router, source) for router in opened.recorded}
    chosen = [router for router in opened.recorded if not reasons[router.name]]
    left_out = [*opened.left_out, *((name, why) for name, why in reasons.items() if why)]
    if not chosen:
        raise UsageError(f"{left_out[0][0]}: {left_out[0][1]}.")
    tensors = {router.name: open_experts(opened.store, router) for router in chosen}
    before = _before(request, chosen)
    experts = [(router, tensors[router.name]) for router in chosen]
    experts += [pair for pairs in before.values() for pair in pairs]
    total = sum(one.bytes_of(gate_alone=True) * _share_of(r.rule, one) for r, one in experts)
    announce_bytes(int(total), "of experts are", request.yes, watch)
    routers, samples = [], []
    work = 2 * chosen[0].num_experts * (2 if before else 1)
    for router in each(chosen, watch, work, is_paced=True):
        has_plane = router.rule.is_affine
        some = np.clip(_INPUTS // router.hidden_size, SMALL_SAMPLE_TOKENS, SAMPLE_TOKENS)
        sample = SliceTokens(**vars(opened.sample(router, ("input", "document"), int(some))))
        samples.append(sample)
        number = _number_of_ways(request, tensors[router.name], router.rule)
        ways, plane = ways_of(sample, number, request.seed), None
        if has_plane:
            name = source.facts.name
            plane = requested_slice(request.subspace, router, sample, name, request.seed)
        pace = SearchPace(watch, request.budget, f"{router.name}: {router.num_experts} experts")
        both = [(router, tensors[router.name]), *before.get(router.name, ())]
        one, *earlier = (
            router_regions(twin, experts, ways, plane, sample, request, pace)
            for twin, experts in both
        )
        if earlier:
            (twin,) = earlier
            one = dataclasses.replace(one, before=EarlierRegions(twin.ways, twin.plane))
        routers.append(one)
    if request.out is not None:
        write_rows(request.out, _rows(routers), chosen)
    return Regions(
        run=opened.facts(chosen),
        routers=tuple(routers),
        left_out=tuple(left_out),
        sample=opened.sample_counts(samples),
        seed=request.seed,
        against=request.against,
        written=None if request.out is None else request.out.name,
    )


def _refuse_no_plane(text: str) -> None:
    """Raises UsageError for a subspace that is no plane, before any token is read."""
    kind, _, value = text.partition(":")
    dims = {"pca": value, "random": value, "plane": str(value.count(","))}.get(kind)
    if dims != "2" and Path(text).suffix != ".npz":
        raise _no_plane(text)


def _no_plane(text: str) -> UsageError:
    return UsageError(
        f"--subspace {text}: regions are counted in a plane.",
        "For example pca:2, random:2 or plane:0,1,2.",
    )


def _why_not(router: Router, source: TokenSource) -> str:
    """Why the choice of a router between two inputs is not known; empty where it is."""
    if router.listed or router.projection is not None or router.rule.score not in SCORES:
        return "its choice between two inputs does not follow from these alone"
    absent = unavailable(router, source.facts)
    return next((absent[name] for name in ("input", "distance", "pair") if name in absent), "")


def _number_of_ways(request: RegionsRequest, tensors: ExpertTensors, rule: Rule) -> int:
    """What is asked for, else as many as so many products allow; k and as many more are met."""
    if request.segments is not None:
        return request.segments
    width = int(tensors.width * _share_of(rule, tensors))
    met = min(4 * rule.top_k, tensors.num_experts) * width * tensors.hidden
    most = _MOST if rule.is_affine else _MOST_CURVED
    return int(np.clip(_PRODUCTS // (2 * met), _FEWEST, most))


def _before(
    request: RegionsRequest, routers: Sequence[Router]
) -> dict[str, list[tuple[Router, ExpertTensors]]]:
    """The same router of the checkpoint to compare with, and its experts, by name."""
    if request.against is None:
        return {}
    other = Session.of(request.against, request)
    named = {router.name: router for router in other.chosen}
    for router in routers:
        twin = named.get(router.name)
        if twin is None or twin.weight.shape != router.weight.shape:
            raise RouterError(
                f"{request.against}: has no router {router.name} of "
                f"{router.num_experts} x {router.hidden_size} to compare with.",
                "--against is an earlier state of the same model.",
            )
    return {r.name: [(named[r.name], open_experts(other.store, named[r.name]))] for r in routers}


def _rows(routers: Sequence[RouterRegions]) -> Iterator[dict[str, Any]]:
    """One row for each way, and one for each cell of the plane."""
    for router in routers:
        for one, is_before in ((router, False), (router.before, True)):
            if one is None:
                continue
            same = {"router": router.router, "against": is_before}
            yield from (same | dataclasses.asdict(way) for way in one.ways)
            if one.plane is None:
                continue
            cells = zip(one.plane.expert_sets, one.plane.of_cell, strict=True)
            for cell, number in cells:
                yield same | {"way": "plane", "cell": list(cell), "regions": float(number)}
