"""``moegeom scan``: tokens through routers, into a results directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegeom_cli.family_options import (
    FamilyFile,
    LogitBias,
    Renormalise,
    RouterPattern,
    Score,
    SelectionBias,
    TopK,
    asked_family,
)
from moegeom_cli.options import (
    AllLayers,
    Checkpoint,
    Device,
    ExcludeFirst,
    Layers,
    NoCache,
    PrintFormat,
    Restart,
    RouterMap,
    StaleInputs,
    Threads,
    Unverified,
    asked_stage,
    default_out,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, parse_map, watching, width

NAME = "scan"
NEEDS_ARGUMENTS = True


def run(
    checkpoint: Checkpoint,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Recording, trace, npy, npz, safetensors, Parquet."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Results directory [default: runs/<checkpoint>.moegeom]."),
    ] = None,
    layers: Layers = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            help="What foreign numbers are: router_input, pre_norm, logits, top_logits, ids.",
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", help="Whose trace it is, where the file does not show it."),
    ] = None,
    router_map: RouterMap = None,
    prior: Annotated[
        str | None,
        typer.Option("--prior", help="isotropic-rms: made-up tokens; geometry only, labelled."),
    ] = None,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Also write tokens/, one row per token.")
    ] = False,
    non_finite: Annotated[
        str, typer.Option("--non-finite", help="Tokens that are not finite: fail or skip.")
    ] = "fail",
    exclude_first: ExcludeFirst = 0,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    all_layers: AllLayers = False,
    restart: Restart = False,
    threads: Threads = None,
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the null and of the prior.")] = 0,
    family: FamilyFile = None,
    router_pattern: RouterPattern = None,
    top_k: TopK = None,
    score: Score = None,
    renormalise: Renormalise = False,
    selection_bias: SelectionBias = None,
    logit_bias: LogitBias = None,
    no_cache: NoCache = False,
    format: PrintFormat = Format.table,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no screen.")] = False,
) -> None:
    """Measure every router on recorded tokens; without tokens, what weights alone tell."""
    from moegeom.core.errors import UsageError
    from moegeom.pipeline import ScanRequest, scan
    from moegeom.report import REPORTERS, View
    from moegeom.results.reader import open_results

    if non_finite not in ("fail", "skip"):
        raise UsageError(f"--non-finite {non_finite}: expected fail or skip.")
    pairs = parse_map(router_map or ())
    watch = watching(quiet)
    request = ScanRequest(
        checkpoint=checkpoint,
        out=out or default_out(checkpoint, "moegeom"),
        tokens=tokens,
        stage=asked_stage(stage),
        dialect=dialect,
        router_map=pairs,
        prior=prior,
        layers=layers,
        per_token=per_token,
        skip_non_finite=non_finite == "skip",
        exclude_first=exclude_first,
        stale_inputs=stale_inputs,
        unverified=unverified,
        restart=restart,
        asked=asked_family(
            family, router_pattern, top_k, score, renormalise, selection_bias, logit_bias
        ),
        rules=rules_folder(),
        remote=remote_options(no_cache),
        seed=seed,
        num_workers=threads,
        device=device,
    )
    try:
        written = scan(request, watch)
    finally:
        watch.close()
    if not quiet:
        view = View(width(), has_colours(), all_layers)
        typer.echo(REPORTERS[format.value].render(open_results(written), view), nl=False)
