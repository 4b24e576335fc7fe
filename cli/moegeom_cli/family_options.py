"""Options that describe the routers of a checkpoint whose family is not known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moegeom.router.asked_family import AskedFamily

_PANEL = "Unknown architectures"

FamilyFile = Annotated[
    Path | None,
    typer.Option("--family", help="TOML file, or name of a family.", rich_help_panel=_PANEL),
]
RouterPattern = Annotated[
    str | None,
    typer.Option(
        "--router-pattern",
        metavar="REGEX",
        help="Names of router weights; a group is the layer.",
        rich_help_panel=_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=1, help="Experts chosen per token.", rich_help_panel=_PANEL),
]
Score = Annotated[
    str | None,
    typer.Option(
        "--score", help="identity, softmax, sigmoid or sqrt_softplus.", rich_help_panel=_PANEL
    ),
]
Renormalise = Annotated[
    bool,
    typer.Option("--renormalise", help="Weights are divided by their sum.", rich_help_panel=_PANEL),
]
SelectionBias = Annotated[
    str | None,
    typer.Option(
        "--selection-bias",
        metavar="REGEX",
        help="Names of biases that only select.",
        rich_help_panel=_PANEL,
    ),
]
LogitBias = Annotated[
    str | None,
    typer.Option(
        "--logit-bias", metavar="REGEX", help="Names of biases of logits.", rich_help_panel=_PANEL
    ),
]


def asked_family(
    file: Path | None = None,
    pattern: str | None = None,
    top_k: int | None = None,
    score: str | None = None,
    renormalise: bool = False,
    selection_bias: str | None = None,
    logit_bias: str | None = None,
) -> AskedFamily:
    """What the options say."""
    from moegeom.router.asked_family import AskedFamily

    return AskedFamily(file, pattern, top_k, score, renormalise, selection_bias, logit_bias)
