"""Claim: 95 % intervals of a scan hold the true figure for 93 to 97 % of the sets of documents.

The documents of a sample recording are taken as the whole population; sets of documents are drawn
from them with replacement, scanned, and each interval (value +- t x standard error, t the 97.5 %
quantile with blocks - 1 degrees of freedom) is compared with the figure of the population. Prints
the share of sets whose interval holds it, column by column.

Figures that finite samples push up (plain CV, MaxVio, expert sets) are listed apart: their interval
is about the figure of as many tokens, not about that of the population.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy.stats import t

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import Router
from moegeom.core.tokens import SourceFacts, TokenColumns, TokenSource
from moegeom.kernels.table import load_kernels
from moegeom.measure.passes import RouterRun, measure_router
from moegeom.metrics import METRICS
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"
CASES = (("olmoe-balanced", 1), ("olmoe-collapsed", 2), ("deepseek-tiny", 0))

#: Metrics whose figures converge to those of the population.
NAMES = (
    "bf16_flip",
    "load",
    "load_balancing_loss",
    "margins",
    "neighbours",
    "noise_sigmas",
    "routing_entropy",
    "tropical_saturation",
    "z_loss",
    "domain_specialisation",
    "coactivation",
    "top1",
    "tokens",
)

#: Columns that finitely many tokens push to one side, by the size of what is estimated.
BIASED = (
    "load_cv",
    "max_vio",
    "gini",
    "load_entropy",
    "effective_experts",
    "coactivation_max",
    "domain_information",
    "group_",
    "load_balancing_loss",
    "first_choice",
)


class FigureResults:
    """Documents of a recording, drawn with replacement; each draw is a document of its own."""

    def __init__(self, source: TokenSource, router: str, documents: np.ndarray) -> None:
        whole = source.facts.num_tokens
        document = source.read_columns(0, whole).document
        parts = [np.flatnonzero(document == d) for d in documents]
        self._row = np.concatenate(parts)
        self._document = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self._columns = source.read_columns(0, whole)
        self._values = np.array(source.read_values(router, 0, whole))
        facts = source.facts
        self.facts = SourceFacts(
            "drawn", facts.stage, len(self._row), (router,), facts.domains, True, False
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        row, columns = self._row[start:stop], self._columns
        return TokenColumns(
            document=self._document[start:stop],
            position=columns.position[row],
            token_id=columns.token_id[row],
            domain=columns.domain[row],
        )

    def read_values(self, router: str, start: int, stop: int) -> np.ndarray:
        return self._values[self._row[start:stop]]

    def read_chosen(self, router: str, start: int, stop: int) -> None:
        return None

    def read_output(self, router: str, kind: str, start: int, stop: int) -> None:
        return None


def _row(router: Router, source: object) -> dict:
    """The row of the whole, without the random router: a stage that has none is not needed here."""
    metrics = [METRICS[name] for name in NAMES]
    rows = measure_router(RouterRun(router, source, load_kernels("cpu"), metrics)).rows["layers"]
    return next(r for r in rows if (r["variant"], r["population"]) == ("as_stored", "all"))


def coverage(model: str, layer: int, sets: int, documents: int) -> dict[str, tuple[float, float]]:
    """By column: share of sets whose interval holds the truth, and that with 1.96 for t."""
    router = load_routers(open_checkpoint(str(SAMPLES / model / "step_1500"))).routers[layer]
    source = open_tokens(str(SAMPLES / model / "rec" / "step_1500"), None, None, (router.name,))
    numbers = np.unique(source.read_columns(0, source.facts.num_tokens).document)
    truth = _row(router, FigureResults(source, router.name, np.repeat(numbers, 16)))
    random = np.random.default_rng(0)
    hits: dict[str, list[tuple[bool, bool]]] = {}
    for _ in range(sets):
        found = _row(router, FigureResults(source, router.name, random.choice(numbers, documents)))
        quantile = t.ppf(0.975, found["num_blocks"] - 1)
        for name in found:
            error = found.get(f"{name}_se")
            if error is None or found[name] is None or truth.get(name) is None or error == 0.0:
                continue
            away = abs(found[name] - truth[name]) / error
            hits.setdefault(name, []).append((away <= quantile, away <= 1.96))
    return {
        name: tuple(np.mean(column) for column in zip(*list_, strict=True))
        for name, list_ in hits.items()
        if len(list_) > sets // 2
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=400)
    parser.add_argument("--documents", type=int, default=128)
    asked = parser.parse_args()
    total: dict[str, list[tuple[float, float]]] = {}
    for model, layer in CASES:
        for name, shares in coverage(model, layer, asked.sets, asked.documents).items():
            total.setdefault(name, []).append(shares)
    plain = {n: s for n, s in total.items() if not n.startswith(BIASED)} | {
        n: s for n, s in total.items() if n == "load_cv_squared_debiased"
    }
    for title, group in (
        ("converging figures", plain),
        (
            "figures that finitely many tokens push to one side",
            {n: total[n] for n in total if n not in plain},
        ),
    ):
        print(f"{title}: share of intervals that hold (t, 1.96), one pair per sample")
        for name, shares in group.items():
            print(f"  {name:36s}" + "  ".join(f"{a:.3f} {b:.3f}" for a, b in shares))
        means = np.array([np.mean(shares, axis=0) for shares in group.values()])
        print(f"  mean over columns: t {means[:, 0].mean():.3f}, 1.96 {means[:, 1].mean():.3f}")
        inside = ((means[:, 0] >= 0.93) & (means[:, 0] <= 0.97)).mean()
        print(f"  columns within .93 to .97: {inside:.2f}\n")


if __name__ == "__main__":
    main()
