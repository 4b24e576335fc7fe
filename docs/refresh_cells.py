"""Writes docs/cells_of_samples.md and its pictures: cells of the sample routers on slices.

``PYTHONPATH=. python docs/refresh_cells.py`` takes some minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from moegeom.routing_cells.record import RouterCells
from moegeom.routing_cells.request import CellsRequest
from moegeom.routing_cells.study import cells

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "sample_ckpts"
PAGE, PICTURES = ROOT / "docs/cells_of_samples.md", ROOT / "docs/pictures"

#: Random routers that each count stands beside.
RANDOM_ROUTERS = 10

#: Name of each picture, its sample, and what is asked for.
DRAWN = {
    "cells_balanced": ("olmoe-balanced", {"subspace": "pca:2"}),
    "cells_collapsed": ("olmoe-collapsed", {"subspace": "pca:2"}),
    "cells_plane_of_tokens": ("olmoe-balanced", {"subspace": "plane:5,900,2500"}),
    "cells_of_one_expert": ("olmoe-balanced", {"subspace": "pca:2", "view": "expert:7"}),
    "cells_grouped": ("deepseek-tiny", {"subspace": "pca:2"}),
}

HEAD = (
    "# Cells of the sample routers\n\n"
    "Written by `docs/refresh_cells.py`. How to read the figures: [cells.md](cells.md).\n\n"
    "The samples are small (16 experts, 4 chosen, 64 dimensions): the numbers show what the "
    "command tells, not what large models look like. *Random* are routers with the same row "
    "lengths, biases and rule on the same slice, mean and standard deviation of 10; *at most* is "
    "the bound for any router of this size (theory.md B4); *own cell* is the share of the tokens "
    "that choose what the slice chooses at the place where they are drawn.\n"
)


def table_row(cells: Sequence[str]) -> str:
    """One line of a table; a bar in a cell does not end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """The page and the pictures."""
    lines = [HEAD, "## Principal slices of the last step", ""]
    lines += [
        table_row(("sample, layer", "d", "variance", "cells", "random", "at most", "own cell")),
        table_row(["---"] * 7),
    ]
    for sample in ("olmoe-balanced", "olmoe-collapsed"):
        for dims in range(2, 7):
            lines += [
                _sliced(f"{sample} {r.router}", r) for r in _looked(sample, "step_1500", dims)
            ]
    lines.append("")
    lines += ["## Over the training", ""]
    lines += [
        table_row(
            (
                "sample",
                "step",
                "layer",
                "cells in pca:3",
                "random",
                "facets between two tokens",
                "own cell",
            )
        ),
        table_row(["---"] * 7),
    ]
    for sample in ("olmoe-balanced", "olmoe-collapsed"):
        for step in _steps(sample):
            for r in _looked(sample, f"step_{step}", 3):
                lines.append(_over_training(sample, step, r))
    lines += ["", "## Pictures", ""]
    for name, (sample, asked) in DRAWN.items():
        lines += _drawn(name, sample, asked)
    PAGE.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


def _request(sample: str, step: str, **asked: object) -> CellsRequest:
    folder = SAMPLES / sample
    return CellsRequest(
        checkpoint=str(folder / step), tokens=str(folder / "rec" / step), num_workers=2, **asked
    )


def _looked(sample: str, step: str, dims: int) -> tuple[RouterCells, ...]:
    return cells(
        _request(sample, step, subspace=f"pca:{dims}", random_routers=RANDOM_ROUTERS)
    ).routers


def _steps(sample: str) -> Iterator[int]:
    for path in sorted((SAMPLES / sample).glob("step_*"), key=lambda p: int(p.name[5:])):
        if (SAMPLES / sample / "rec" / path.name).exists():
            yield int(path.name[5:])


def _random(r: RouterCells) -> str:
    return "" if r.random is None else f"{r.random.mean:,.0f} +- {r.random.sd:.0f}"


def _own(r: RouterCells) -> str:
    assert r.num_own is not None
    assert r.num_tokens
    return f"{100 * r.num_own / r.num_tokens:.2f} %"


def _sliced(name: str, r: RouterCells) -> str:
    assert r.cells is not None
    assert r.variance_share is not None
    most = min(r.num_possible, r.most_cells or r.num_possible)
    share = f"{100 * r.variance_share:.1f} %"
    return table_row(
        (name, str(r.dims), share, f"{r.cells.num_cells:,}", _random(r), f"{most:,}", _own(r))
    )


def _over_training(sample: str, step: int, r: RouterCells) -> str:
    assert r.cells is not None
    assert r.between is not None
    between = f"{r.between.mean_crossings:.2f}"
    return table_row(
        (sample, str(step), r.router, f"{r.cells.num_cells:,}", _random(r), between, _own(r))
    )


def _drawn(name: str, sample: str, asked: dict[str, object]) -> Iterator[str]:
    path = PICTURES / f"{name}.png"
    layer = "1" if sample == "deepseek-tiny" else "0"
    cells(_request(sample, "step_1500", layers=layer, plot=path, caption=True, dpi=150, **asked))
    yield f"![{name.replace('_', ' ')}](pictures/{name}.png)"
    yield ""


if __name__ == "__main__":
    main()
