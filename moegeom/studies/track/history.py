"""Rows, biases and loads of every router at every step, for the checks of a series."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moegeom.checks import measured_results, run_checks
from moegeom.checks.profile import DEFAULT
from moegeom.core.finding import Finding
from moegeom.core.row_keys import ALL, is_domain
from moegeom.core.shapes import Float, Float64
from moegeom.geometry.series import changes
from moegeom.studies.track.measure import ByPopulation, MeasuredStep
from moegeom.studies.track.paths import LeftStep

#: Numbers by step and expert.
ByExpert = Float64[np.ndarray, "steps experts"]


@dataclass(frozen=True, eq=False)
class Concentration:
    """Effective number of experts that carry the load of one population, at each step.

    ``num_blocks`` is the least number of blocks of documents of any step.
    """

    effective: Float64[np.ndarray, "steps"]
    errors: Float64[np.ndarray, "steps"]
    num_blocks: int


@dataclass(frozen=True, eq=False)
class RouterHistory:
    """One router of the same shape at every step.

    ``rows`` are its weights, or what results keep of them; empty where a step has neither.
    ``row_digests`` and ``bias_digests`` tell bits apart. ``bias`` is the selection bias, ``loads``
    are in fair shares; None where a step lacks one. ``concentrations`` are by population.
    """

    name: str
    rows: tuple[Float[np.ndarray, "experts width"], ...]
    row_digests: tuple[str, ...]
    bias: ByExpert | None
    bias_digests: tuple[str, ...]
    loads: ByExpert | None
    concentrations: Mapping[str, Concentration]

    @cached_property
    def grams(self) -> Float64[np.ndarray, "experts steps steps"] | None:
        """Inner products of the states of each row, all states of one length, their mean out.

        A common factor says nothing of where the rows point. None without rows.
        """
        if not self.rows:
            return None
        lengths = np.array([np.linalg.norm(rows) for rows in self.rows], np.float64)
        if not np.isfinite(lengths).all() or lengths.min() == 0.0:
            return None
        products = np.empty((len(self.rows[0]), len(lengths), len(lengths)))
        for expert in range(len(products)):
            states = np.stack([rows[expert] for rows in self.rows]) / lengths[:, None]
            states -= states.mean(axis=0)
            products[expert] = states @ states.T
        return products

    @cached_property
    def row_rates(self) -> Float64[np.ndarray, "intervals"] | None:
        """Relative change of the rows from step to step; 0 only where no bit changed."""
        return changes(self.rows, self.row_digests) if self.rows else None

    @cached_property
    def bias_rates(self) -> Float64[np.ndarray, "intervals"] | None:
        """Change of the biases over their largest spread, a common offset taken out."""
        if self.bias is None:
            return None
        centred = self.bias - self.bias.mean(axis=1, keepdims=True)
        most = float(np.linalg.norm(centred, axis=1).max())
        moved = np.linalg.norm(np.diff(centred, axis=0), axis=1)
        return moved / most if most > 0.0 else np.zeros(len(moved))


@dataclass(frozen=True, eq=False)
class History:
    """A series as its findings see it.

    ``other_text`` says why loads of different steps may be those of different texts; empty where
    the tokens are the same at every step. ``left_out`` are routers that not every step has alike.
    ``unread`` are steps that cannot be read, with the reason, and ``broken`` those that a check of
    integrity fails, with the path as a shell takes it and the findings.
    """

    steps: Float64[np.ndarray, "steps"]
    routers: tuple[RouterHistory, ...]
    has_tokens: bool
    other_text: str = ""
    left_out: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    broken: tuple[tuple[str, str, tuple[Finding, ...]], ...] = ()

    @property
    def has_bias(self) -> bool:
        """Whether any router has a selection bias."""
        return any(router.bias is not None for router in self.routers)

    @property
    def domains(self) -> tuple[str, ...]:
        """Populations of domains that every step tells of, at some router."""
        names = (name for router in self.routers for name in router.concentrations)
        return tuple(dict.fromkeys(filter(is_domain, names)))

    def step(self, index: int) -> str:
        """The number of a step, as it is printed."""
        return f"{self.steps[index]:.15g}"


#: Checks of one checkpoint that every step is held to.
INTEGRITY = dataclasses.replace(DEFAULT, select=("MGI",))


def history(
    measured: Sequence[MeasuredStep], other_text: str, skipped: Sequence[LeftStep] = ()
) -> History:
    """The routers that are at every step, in the order of the last."""
    layers, experts = [step.layers for step in measured], [step.experts for step in measured]
    weights = [{router.name: router.weight for router in step.routers or ()} for step in measured]
    routers, left_out = [], []
    for name in layers[-1]:
        sizes = {len(at.get(name, {}).get(ALL, ())) for at in experts}
        if len(sizes) == 1 and sizes != {0} and all(name in at for at in layers):
            tables = [[at[name] for at in table] for table in (layers, experts)]
            routers.append(_router(name, tables[0], tables[1], [at.get(name) for at in weights]))
        else:
            left_out.append(name)
    steps = np.array([step.facts.step for step in measured], dtype=np.float64)
    has_tokens = all(step.facts.num_tokens for step in measured)
    unread = tuple((one.name, one.reason) for one in skipped if not one.is_being_written)
    return History(
        *(steps, tuple(routers), has_tokens, other_text, tuple(left_out)),
        unread,
        tuple(_broken(measured)),
    )


def _broken(measured: Sequence[MeasuredStep]) -> Iterator[tuple[str, str, tuple[Finding, ...]]]:
    for step in measured:
        judged = measured_results(step.results, str(step.path))
        verdict = run_checks(judged, INTEGRITY)
        if failed := tuple(f for f in verdict.findings if f.severity == "error"):
            yield step.facts.name, judged.checkpoint, failed


def _router(
    name: str,
    layers: Sequence[ByPopulation],
    experts: Sequence[ByPopulation],
    weights: Sequence[np.ndarray | None],
) -> RouterHistory:
    rows = _alike(weights) or _alike([of_experts(at, "row_projections") for at in experts])
    digests = [
        tuple(at[ALL][0].get(f"{part}_digest") or "" for at in layers)
        for part in ("weight", "selection_bias")
    ]
    populations = [p for p in layers[-1] if all(p in at for at in layers)]
    concentrations = {p: _concentration([at[p][0] for at in layers]) for p in populations}
    return RouterHistory(
        name,
        rows,
        digests[0],
        _stacked(experts, "selection_bias"),
        digests[1],
        _stacked(experts, "load"),
        {population: one for population, one in concentrations.items() if one is not None},
    )


def of_experts(at: ByPopulation, column: str) -> np.ndarray | None:
    """A figure of all experts; None where one is missing or not finite."""
    values = [row.get(column) for row in at[ALL]]
    if any(value is None for value in values):
        return None
    numbers = np.array(values, dtype=np.float64)
    return numbers if np.isfinite(numbers).all() else None


def _alike(states: Sequence[np.ndarray | None]) -> tuple[np.ndarray, ...]:
    """The states in the order of steps, when there is one at every step, of one shape."""
    arrays = [state for state in states if state is not None and state.size]
    alike = len(arrays) == len(states) and len({state.shape for state in arrays}) == 1
    return tuple(arrays) if alike else ()


def _stacked(experts: Sequence[ByPopulation], column: str) -> ByExpert | None:
    states = _alike([of_experts(at, column) for at in experts])
    return np.stack(states) if states else None


def _concentration(rows: Sequence[Mapping[str, Any]]) -> Concentration | None:
    names = ("effective_experts", "effective_experts_se", "num_blocks")
    figures = np.array([[row.get(name) for row in rows] for name in names], dtype=np.float64)
    if not np.isfinite(figures).all():  # what is missing is nan
        return None
    return Concentration(figures[0], figures[1], int(figures[2].min()))
