"""Trains methods of routing beside each other, on the same seeds, batches and initial weights.

    python -m benchmarks.trained.compare --quick
    python -m benchmarks.trained.compare --full --methods top-k,smooth --seeds 2
    python -m benchmarks.trained.compare --digits
    python -m benchmarks.trained.compare --study temperature
    python -m benchmarks.trained.compare --quick --steps 5   # a trial, into a new directory

Results go to ``benchmarks/results/trained``, a run at a time; runs that are there are not made
again. Prints, for each run, the figure over that of top-k with the same seed. What came out stands
in docs/comparison.md, which ``docs/refresh_comparison.py`` writes from the result files.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.trained import digits, training
from benchmarks.trained.methods import BASE, METHODS
from benchmarks.trained.records import FOLDER, ResultFile, facts_of
from benchmarks.trained.settings import SIZES, Settings
from benchmarks.trained.studies import SEEDS, STUDIES
from benchmarks.trained.text import text_facts

CLAIM = "which methods of routing train a better model than top-k, at a size that two cores repeat"

#: The figure whose ratio is printed.
FIGURE = {"digits": "accuracy"}


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is trained under which names, with which settings, and what it is compared with."""

    name: str
    settings: Settings
    entries: Sequence[str]
    base: str
    train: Callable[[str, Settings, int], list[training.Run]]

    @property
    def figure(self) -> str:
        return FIGURE.get(self.name, "bits")


def language(size: str) -> Suite:
    """The byte language models of one size."""
    return Suite(
        size,
        SIZES[size],
        tuple(METHODS),
        BASE,
        lambda name, settings, seed: training.train(METHODS[name], settings, seed),
    )


def images() -> Suite:
    """The digits."""
    return Suite(
        "digits",
        digits.DIGITS,
        digits.METHODS,
        BASE,
        lambda name, settings, seed: digits.train(METHODS[name], settings, seed),
    )


def study(name: str) -> Suite:
    """One study of the quick setting."""
    of = STUDIES[name]
    settings = dataclasses.replace(SIZES["quick"], seeds=SEEDS)
    return Suite(f"study-{name}", settings, tuple(of.values), of.base, of.train)


def run_suite(suite: Suite, out: Path, names: Sequence[str]) -> ResultFile:
    """Makes the runs that are missing, seed by seed, and prints each with its ratio."""
    text = {} if suite.name == "digits" else text_facts()
    results = ResultFile.open(out / f"{suite.name}.json", facts_of(CLAIM, suite.settings, text))
    for seed in range(suite.settings.seeds):
        for name in names:
            if not results.has(method=name, seed=seed):
                made = suite.train(name, suite.settings, seed)
                results.add(made)
                for run in made:
                    print(said(run, results, suite), flush=True)
    return results


def said(run: training.Run, results: ResultFile, suite: Suite) -> str:
    """A run's figure, and over that of the base with the same seed."""
    value = run["figures"][suite.figure]
    base = [
        other
        for other in results.runs
        if (other["method"], other["seed"]) == (suite.base, run["seed"])
    ]
    line = f"{suite.name} seed {run['seed']} {run['method']:24} {suite.figure} {value:.4f}"
    if not base:
        return line
    return f"{line}, over {suite.base} {value / base[0]['figures'][suite.figure]:.4f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    for size in SIZES:
        what.add_argument(
            f"--{size}", dest="size", action="store_const", const=size, help=f"the {size} size"
        )
    what.add_argument("--digits", action="store_true", help="turned digits, one angle left out")
    what.add_argument("--study", choices=sorted(STUDIES), help="one thing changed at a time")
    parser.add_argument("--methods", help="of these alone, with commas between")
    parser.add_argument("--seeds", type=int, help="seeds from 0 on")
    parser.add_argument("--steps", type=int, help="a training of another length")
    parser.add_argument("--out", type=Path, help="where to write")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.study:
        suite = study(arguments.study)
    else:
        suite = images() if arguments.digits else language(arguments.size)
    names = arguments.methods.split(",") if arguments.methods else suite.entries
    unknown = sorted(set(names) - set(suite.entries))
    if unknown:
        raise SystemExit(
            f"--methods: no {', '.join(unknown)}; there are {', '.join(suite.entries)}"
        )
    changed = {"seeds": arguments.seeds, "steps": arguments.steps}
    changed = {name: value for name, value in changed.items() if value is not None}
    suite = dataclasses.replace(suite, settings=dataclasses.replace(suite.settings, **changed))
    # a shortened training must not stand among the whole ones
    trial = arguments.steps is not None and arguments.out is None
    out = Path(tempfile.mkdtemp(prefix="trained-")) if trial else arguments.out or FOLDER
    training.prepare_torch()
    print(f"written to {run_suite(suite, out, names).path}")


if __name__ == "__main__":
    main()
