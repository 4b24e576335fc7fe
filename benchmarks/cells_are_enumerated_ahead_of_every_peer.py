"""Claim: all cells and facets of a top-k router on a slice, proved, before any peer has the cells.

Routers are z = W x + b with standard normal numbers, written (E, k, d). Prints, in one process, on
one thread, in processor time, the least of several repeats, moegeom and the peers by turns:

- for each peer seconds, the ratio to moegeom's cells, facets and witnesses, and how many cells it
  finds: WRONG where that is not the certified number,
- the walk per vertex over the same in plain C++ without proofs (plain_walk.cpp, where there is a
  compiler), in turns, medians; its E (d + 1)^2 multiply-adds over those of the fastest float64
  product in this process in the same time, the share of vertices that exact arithmetic settled,
  and microseconds per vertex and, for the full output, per cell,
- one thread over two by the clock, and the memory of the largest walk,
- with ``--compile`` (in an empty NUMBA_CACHE_DIR) seconds of the first walk, and of the first one
  in another number of dimensions.

Peers: Qhull's hull of all sums of k rows (where there are at most a million); Qhull's intersection
of half-spaces, breadth first, in a box; HiGHS on one linear program per set, or breadth first over
facets with one program per expert and per pair of facets; cddlib's redundancy of all sums. Each has
``--limit`` seconds; "~" marks what is extrapolated from the part that was done by then. A peer that
is not installed is skipped.

Targets (docs/benchmarks.md): at most 1.5 times plain C++; 150 bytes a vertex; ratio > 1 for all
peers; nothing settled exactly on generic numbers.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from moegeom.routing_cells.walk.enumeration import Enumeration, enumerate_cells
from moegeom.routing_cells.walk.level_walk import level_walk

#: (E, k, d)
AGAINST_PEERS = (
    (16, 2, 3), (16, 4, 4), (24, 4, 4), (32, 4, 3), (20, 6, 5), (64, 4, 3), (256, 2, 3),
    (64, 8, 2), (64, 8, 3), (64, 6, 4), (128, 8, 3), (256, 8, 2),
)  # fmt: skip
SPEEDS = ((64, 8, 2), (64, 8, 3), (64, 6, 4), (128, 8, 3), (256, 8, 2), (64, 8, 5))
LARGEST = (64, 8, 6)

#: Sums that a hull is asked for at most.
MOST_SUMS, MOST_SUMS_OF_CDD = 10**6, 2000

#: Half the side of the box that makes all cells bounded, and what counts as more than nothing.
BOX, TINY = 1e3, 1e-9


@dataclass(frozen=True, eq=False)
class Case:
    """A router on a slice."""

    weight: np.ndarray
    bias: np.ndarray
    k: int

    @property
    def num_sums(self) -> int:
        return math.comb(len(self.bias), self.k)

    def chosen(self, point: np.ndarray) -> frozenset[int]:
        logits = self.weight @ point + self.bias
        return frozenset(np.argsort(-logits)[: self.k].tolist())


#: Cells with a point of each, and how a search gets to the neighbours of one: the expert that
#: leaves, the one that enters, and a point there.
Found = dict[frozenset[int], np.ndarray]
Neighbours = Callable[[frozenset[int], Found], Iterator[tuple[int, int, np.ndarray]]]


@dataclass(frozen=True)
class Answer:
    """``done`` of ``work`` pieces (cells, sets) in ``seconds``; all where ``work`` is None."""

    seconds: float
    cells: int
    done: int = 0
    work: int | None = None


def random_case(experts: int, k: int, dims: int) -> Case:
    """The instances of the documentation."""
    random = np.random.default_rng(0)
    return Case(random.standard_normal((experts, dims)), random.standard_normal(experts), k)


def all_sums(case: Case) -> np.ndarray:
    """Sums of the lifted rows of every k experts."""
    lifted = np.column_stack([case.weight, case.bias])
    total = np.zeros((1, lifted.shape[1]))
    last = np.full(1, -1)
    for left in range(case.k, 0, -1):
        pieces = [
            (total[last < j] + lifted[j], np.full(int((last < j).sum()), j))
            for j in range(len(lifted) - left + 1)
        ]
        total, last = (np.concatenate(part) for part in zip(*pieces, strict=True))
    return total


def hull_of_sums(case: Case, _: float) -> Answer:
    """A set is a cell where its sum is a vertex of the upper hull."""
    from scipy.spatial import ConvexHull

    hull = ConvexHull(all_sums(case))
    cells = np.unique(hull.simplices[hull.equations[:, -2] > 0.0])
    return Answer(0.0, len(cells))


def cdd_of_sums(case: Case, _: float) -> Answer:
    """The same, with a ray downwards, one linear program per sum."""
    import cdd

    sums = all_sums(case)
    rows = np.column_stack([np.ones(len(sums)), sums]).tolist()
    down = [0.0] * (sums.shape[1]) + [-1.0]
    matrix = cdd.matrix_from_array([*rows, down], rep_type=cdd.RepType.GENERATOR)
    return Answer(0.0, len(sums) - len(cdd.redundant_rows(matrix) - {len(sums)}))


def searched(
    start: frozenset[int], point: np.ndarray, neighbours: Neighbours, limit: float
) -> Answer:
    """Breadth first from a cell, until all are found or the time is over."""
    found, waiting, started = {start: point}, [start], time.process_time()
    for done, cell in enumerate(waiting):  # which grows
        if time.process_time() - started > limit:
            return Answer(0.0, len(found), done, 0)
        for out, into, inner in neighbours(cell, found):
            other = cell - {out} | {into}
            if other not in found:
                found[other] = inner
                waiting.append(other)
    return Answer(0.0, len(found))


def half_spaces(case: Case, limit: float) -> Answer:
    """Qhull's facets of every cell; the neighbour's point is mid-way through it on a line."""
    from scipy.spatial import HalfspaceIntersection, QhullError

    d = case.weight.shape[1]
    facets_of_box = np.vstack([np.eye(d), -np.eye(d)])

    def constraints(cell: frozenset[int]) -> tuple[np.ndarray, list[tuple[int, int]]]:
        inside = np.array(sorted(cell))
        rest = np.setdiff1d(np.arange(len(case.bias)), inside)
        rows = (case.weight[rest][None] - case.weight[inside][:, None]).reshape(-1, d)
        offset = (case.bias[rest][None] - case.bias[inside][:, None]).reshape(-1)
        whole = np.column_stack(
            [np.vstack([rows, facets_of_box]), np.append(offset, np.full(2 * d, -BOX))]
        )
        return whole, list(itertools.product(inside.tolist(), rest.tolist()))

    def neighbours(cell: frozenset[int], known: Found) -> Iterator[tuple[int, int, np.ndarray]]:
        point, (rows, pairs) = known[cell], constraints(cell)
        try:
            found = HalfspaceIntersection(rows, point)
        except QhullError:
            return
        corners_of: dict[int, list[int]] = {}
        for corner, facet in enumerate(found.dual_facets):
            for number in facet:
                corners_of.setdefault(number, []).append(corner)
        for number, corners in corners_of.items():
            if number >= len(pairs):
                continue
            out, into = pairs[number]
            if cell - {out} | {into} in known:
                continue
            along = found.intersections[corners].mean(axis=0) - point
            behind, _ = constraints(cell - {out} | {into})
            value, slope = behind[:, :-1] @ point + behind[:, -1], behind[:, :-1] @ along
            with np.errstate(divide="ignore"):
                ends = -value / slope
            first, last = ends[slope < 0].max(), ends[slope > 0].min()
            if first < last:
                yield out, into, point + 0.5 * (first + last) * along

    return searched(case.chosen(np.zeros(d)), np.zeros(d), neighbours, limit)


class Programs:
    """HiGHS on the lifted cell: z_i - t >= m inside, z_j - t <= -m outside, m as large as may be.

    Rows are changed in place, so that each program starts from the basis of the one before.
    """

    def __init__(self, case: Case) -> None:
        import highspy

        self._infinity, self._optimal = highspy.kHighsInf, highspy.HighsModelStatus.kOptimal
        experts, d = case.weight.shape
        self._solver = solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        free = [-self._infinity] * (d + 1)
        lower = [*free, -self._infinity]
        solver.addVars(d + 2, np.array(lower), np.array([self._infinity] * (d + 1) + [1.0]))
        index = np.arange(d + 2, dtype=np.int32)
        for row in case.weight:
            values = np.append(row, [-1.0, 1.0])
            solver.addRow(-self._infinity, self._infinity, d + 2, index, values)
        solver.changeColCost(d + 1, -1.0)
        self._bias, self._d = case.bias.tolist(), d
        self._side: list[int | None] = [None] * experts

    def put(self, expert: int, side: int) -> None:
        """Inside (1), outside (-1), or on the level (0)."""
        if self._side[expert] == side:
            return
        self._side[expert] = side
        level, infinity = -self._bias[expert], self._infinity
        self._solver.changeCoeff(expert, self._d + 1, -float(side))
        bounds = {1: (level, infinity), -1: (-infinity, level), 0: (level, level)}[side]
        self._solver.changeRowBounds(expert, *bounds)

    def put_cell(self, cell: frozenset[int]) -> None:
        for expert in range(len(self._side)):
            self.put(expert, 1 if expert in cell else -1)

    def value(self) -> float:
        """The objective; infinity where there is no solution."""
        self._solver.run()
        if self._solver.getModelStatus() != self._optimal:
            return math.inf
        return self._solver.getInfo().objective_function_value

    def is_open(self) -> bool:
        return self.value() < -TINY


def programs_per_set(case: Case, limit: float) -> Answer:
    """One linear program for every k experts, in lexicographic order."""
    programs, started = Programs(case), time.process_time()
    cells = 0
    for done, chosen in enumerate(itertools.combinations(range(len(case.bias)), case.k)):
        if time.process_time() - started > limit:
            return Answer(0.0, cells, done, case.num_sums)
        programs.put_cell(frozenset(chosen))
        cells += programs.is_open()
    return Answer(0.0, cells)


def programs_over_facets(case: Case, limit: float) -> Answer:
    """Facets of the lifted cell first, then the sets with one above and one below exchanged.

    Each set is asked for once; cells whose facets are exchanged need not touch, but are cells.
    """
    programs, origin = Programs(case), np.zeros(case.weight.shape[1])
    empty = set()

    def neighbours(cell: frozenset[int], known: Found) -> Iterator[tuple[int, int, np.ndarray]]:
        programs.put_cell(cell)
        facets = []
        for expert in range(len(case.bias)):
            side = 1 if expert in cell else -1
            programs.put(expert, 0)
            if programs.is_open():
                facets.append(expert)
            programs.put(expert, side)
        rest = [expert for expert in facets if expert not in cell]
        for out, into in itertools.product(cell.intersection(facets), rest):
            other = cell - {out} | {into}
            if other in known or other in empty:
                continue
            programs.put(out, -1)
            programs.put(into, 1)
            if programs.is_open():
                yield out, into, origin
            else:
                empty.add(other)
            programs.put(out, 1)
            programs.put(into, -1)

    return searched(case.chosen(origin), origin, neighbours, limit)


@dataclass(frozen=True)
class Peer:
    """``most`` sums are what it can be asked for; ``module`` has to be installed."""

    name: str
    run: Callable[[Case, float], Answer]
    module: str
    most: float = math.inf


PEERS = (
    Peer("Qhull, hull of all sums", hull_of_sums, "scipy.spatial", MOST_SUMS),
    Peer("Qhull, half-spaces breadth first", half_spaces, "scipy.optimize"),
    Peer("HiGHS, each set", programs_per_set, "highspy"),
    Peer("HiGHS, breadth first", programs_over_facets, "highspy"),
    Peer("cddlib, redundancy of all sums", cdd_of_sums, "cdd", MOST_SUMS_OF_CDD),
)


def moegeom_cells(case: Case) -> int:
    """Cells, facets and witnesses."""
    found = enumerate_cells(case.weight, case.bias, case.k)
    assert isinstance(found, Enumeration)
    return len(found.expert_set)


def seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started


def limited(work: Callable[[], object], limit: float) -> object | None:
    """What ``work`` returns, in a copy of this process; None where it takes much longer."""

    def sent() -> None:
        there.send(work())

    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=sent)
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(3 * limit + 10) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def timed_peer(peer: Peer, case: Case, limit: float) -> Answer | None:
    """Its answer with the seconds it took."""

    def work() -> Answer:
        started = time.process_time()
        found = peer.run(case, limit)
        seconds = time.process_time() - started
        return replace(found, seconds=seconds)

    found = limited(work, limit)
    return found if isinstance(found, Answer) else None


def compared(case: Case, peers: tuple[Peer, ...], name: str, limit: float, repeats: int) -> None:
    """Lines for one instance."""
    cells, bare = moegeom_cells(case), math.inf
    able = [peer for peer in peers if find_spec(peer.module) and case.num_sums <= peer.most]
    best: dict[str, Answer | None] = {}
    for turn in range(repeats):
        bare = min(bare, seconds_of(lambda: moegeom_cells(case), time.process_time))
        for peer in able:
            before = best.get(peer.name)
            if turn and (before is None or before.seconds > 1.0):
                continue
            found = timed_peer(peer, case, limit)
            if before is None or (found and found.seconds < before.seconds):
                best[peer.name] = found
    print(f"{name}: {cells} cells, moegeom {bare:.2g} s", flush=True)
    for peer_name, found in best.items():
        if found is None:
            print(f"    {peer_name}: no answer in {3 * limit + 10:.0f} s by the clock")
            continue
        seconds, about, says = found.seconds, "", f"{found.cells} cells"
        if found.work is not None:
            # a search is through when all cells are, sets when all of them were asked for
            seconds *= (found.work or cells) / max(found.done, 1)
            about, says = "~", f"{found.done} of {found.work or cells} done"
        elif found.cells != cells:
            says += " WRONG"
        print(f"    {peer_name}: {about}{seconds:.2g} s, ratio {about}{seconds / bare:.3g}, {says}")


def product_rate(repeats: int) -> float:
    """Multiply-adds per second of the fastest float64 product here, on one thread."""
    size = 1024
    values = np.random.default_rng(0).standard_normal((size, size))
    products: list[Callable[[], object]] = [lambda: values @ values]
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)
        tensor = torch.from_numpy(values)
        products.append(lambda: tensor @ tensor)
    best = min(seconds_of(run, time.process_time) for run in products * (2 * repeats))
    return size**3 / best


def plain_walk(folder: str) -> ctypes.CDLL | None:
    """The walk in C++; None without a compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        print("no C++ compiler: plain_walk.cpp skipped")
        return None
    source, library = Path(__file__).with_name("plain_walk.cpp"), Path(folder) / "plain_walk.so"
    flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    found = ctypes.CDLL(str(library))
    found.walk_vertices.restype = ctypes.c_long
    return found


def over_plain(plain: ctypes.CDLL, case: Case, repeats: int) -> float:
    """Processor time of the walk over that in C++, by turns, the median of ratios."""
    walked = level_walk(case.weight, case.bias, case.k, 10**7)
    assert walked is not None
    first, columns = np.ascontiguousarray(walked.on[0]), np.ascontiguousarray(case.weight.T)
    experts, d = case.weight.shape
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (columns, case.bias, first)]

    def in_cpp() -> None:
        found = plain.walk_vertices(*pointers[:2], experts, d, case.k, pointers[2])
        assert found == len(walked.on)

    # small ones several times, of which the least counts
    times = max(1, 100_000 // len(walked.on))
    ratios = []
    for _ in range(repeats):
        least = [
            min(seconds_of(work, time.process_time) for _ in range(times))
            for work in (lambda: level_walk(case.weight, case.bias, case.k, 10**7), in_cpp)
        ]
        ratios.append(least[0] / least[1])
    return statistics.median(ratios)


def compilation() -> None:
    """Processor time of the first walks beyond that of second ones."""
    for shape in ((16, 4, 3), (16, 4, 4)):
        case = random_case(*shape)
        first, second = (
            seconds_of(lambda case=case: moegeom_cells(case), time.process_time) for _ in range(2)
        )
        print(f"{shape}: the first takes {first - second:.1f} s more than the second")


def speed(
    shape: tuple[int, int, int], rate: float, repeats: int, plain: ctypes.CDLL | None
) -> None:
    """The walk per vertex and the full output per cell."""
    (experts, k, d), case = shape, random_case(*shape)
    found = enumerate_cells(case.weight, case.bias, k)
    assert isinstance(found, Enumeration)

    def walk(threads: int) -> Callable[[], object]:
        return lambda: level_walk(case.weight, case.bias, k, 10**7, threads)

    walk(2)()
    walking = whole = math.inf
    clock = {1: math.inf, 2: math.inf}
    for _ in range(repeats):
        walking = min(walking, seconds_of(walk(1), time.process_time))
        whole = min(whole, seconds_of(lambda: moegeom_cells(case), time.process_time))
        clock = {
            threads: min(least, seconds_of(walk(threads), time.perf_counter))
            for threads, least in clock.items()
        }
    vertices, cells = found.num_vertices, len(found.expert_set)
    share = experts * (d + 1) ** 2 * vertices / walking / rate
    print(
        f"{shape}: {vertices} vertices, {cells} cells, {len(found.facets)} facets, settled exactly "
        f"{found.num_exact / vertices:.2g}, least sign {found.gap:.0f} bounds; multiply-adds "
        f"{share:.3f} of the product's rate; {1e6 * walking / vertices:.2f} us/vertex, full "
        f"{1e6 * whole / cells:.1f} us/cell; one thread over two {clock[1] / clock[2]:.2f}",
        flush=True,
    )
    if plain is not None and d <= 6:
        print(f"    {over_plain(plain, case, repeats):.2f} times plain C++", flush=True)


def largest() -> None:
    """Seconds and memory of the largest walk, alone and with everything."""
    case = random_case(*LARGEST)

    def work(full: bool) -> tuple[float, float, int]:
        moegeom_cells(random_case(16, 4, 3))  # compiles
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        if full:
            found = enumerate_cells(case.weight, case.bias, case.k)
            assert isinstance(found, Enumeration)
            num = found.num_vertices
        else:
            walked = level_walk(case.weight, case.bias, case.k, 10**7)
            num = 0 if walked is None else len(walked.on)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return time.process_time() - started, 2**10 * peak / num, num

    for full, what in ((False, "walk"), (True, "cells, facets and witnesses")):
        found = limited(lambda full=full: work(full), 200.0)
        if isinstance(found, tuple):
            seconds, peak, num = found
            print(f"{LARGEST}, {num} vertices: {what} in {seconds:.1f} s, {peak:.0f} bytes each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each peer")
    parser.add_argument("--quick", action="store_true", help="small instances, one second a peer")
    parser.add_argument("--compile", action="store_true", help="only what compiling takes")
    options = parser.parse_args()
    if options.compile:
        compilation()
        return
    limit = 1.0 if options.quick else options.limit
    for peer in PEERS:
        if find_spec(peer.module) is None:
            print(f"{peer.module} is not installed: {peer.name} skipped")
            continue
        import_module(peer.module)  # once, outside of the times
    with threadpool_limits(1, user_api="blas"):
        rate = product_rate(options.repeats)
        print(f"float64 product, one thread: {1e-9 * rate:.1f} billion multiply-adds/s")
        with tempfile.TemporaryDirectory() as folder:
            plain = plain_walk(folder)
            for shape in SPEEDS[:4] if options.quick else SPEEDS:
                speed(shape, rate, options.repeats, plain)
        for shape in AGAINST_PEERS[:4] if options.quick else AGAINST_PEERS:
            compared(random_case(*shape), PEERS, str(shape), limit, options.repeats)
        if not options.quick:
            largest()


if __name__ == "__main__":
    main()
