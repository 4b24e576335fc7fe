"""``moegeom check``: may this checkpoint ship?"""

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
    CheckpointOrResults,
    Device,
    Layers,
    NoCache,
    PrintFormat,
    RouterMap,
    StaleInputs,
    Threads,
    Unverified,
    asked_stage,
    remote_options,
)
from moegeom_cli.state import rules_folder
from moegeom_cli.streams import Format, has_colours, parse_map, watching, width

NAME = "check"
NEEDS_ARGUMENTS = True


def run(
    target: CheckpointOrResults = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Recording, or npy, npz, safetensors, Parquet (--stage)."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="What foreign numbers are, as for scan."),
    ] = None,
    router_map: RouterMap = None,
    layers: Layers = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="File to compare with.")
    ] = None,
    update_baseline: Annotated[
        bool,
        typer.Option("--update-baseline", help="Write the baseline instead of comparing with it."),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="TOML file [default: moegeom.toml, or [tool.moegeom]]."),
    ] = None,
    select: Annotated[
        str | None, typer.Option("--select", help="Codes or their beginnings: MGI,MGN112.")
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", help="Least severity that fails: error, warning.")
    ] = None,
    report: Annotated[
        list[str] | None,
        typer.Option("--report", help="NAME=FILE, repeatable: junit, github, md, json, table."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep the results in this directory.")
    ] = None,
    stale_inputs: StaleInputs = False,
    unverified: Unverified = False,
    threads: Threads = None,
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the null.")] = 0,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="Print the page of a check.")
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Write a commented moegeom.toml and stop.")
    ] = False,
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
) -> int:
    """Judge a checkpoint: exit code 0 passed, 1 failed, 4 inconclusive."""
    from moegeom_cli.check_reports import parse_reports, write_reports

    if explain is not None:
        _explain(explain)
        return 0
    if init:
        _init()
        return 0
    from moegeom.core.errors import UsageError

    if target is None:
        raise UsageError("check needs a checkpoint or results.", "moegeom check CKPT")
    reports = parse_reports(report or (), format)
    from moegeom.check.profile_file import fail_on as parse_fail_on
    from moegeom.check.profile_file import known_code
    from moegeom.report import VERDICT_REPORTERS, View
    from moegeom.studies.gate import GateRequest, gate

    request = GateRequest(
        target=target,
        tokens=tokens,
        stage=asked_stage(stage),
        router_map=parse_map(router_map or ()),
        layers=layers,
        profile=profile,
        baseline=baseline,
        update_baseline=update_baseline,
        select=None
        if select is None
        else tuple(known_code(code.strip(), "--select") for code in select.split(",")),
        fail_on=None if fail_on is None else parse_fail_on(fail_on, "--fail-on"),
        out=out,
        stale_inputs=stale_inputs,
        unverified=unverified,
        asked=asked_family(
            family, router_pattern, top_k, score, renormalise, selection_bias, logit_bias
        ),
        rules=rules_folder(),
        remote=remote_options(no_cache),
        seed=seed,
        num_workers=threads,
        device=device,
    )
    watch = watching(quiet)
    try:
        found = gate(request, watch, lambda text: None if quiet else typer.echo(text, err=True))
    finally:
        watch.close()
    if not quiet:
        view = View(width(), has_colours())
        render = VERDICT_REPORTERS[format.value].render
        typer.echo(render(found.verdict, found.run, view), nl=False)
    write_reports(reports, found.verdict, found.run)
    if found.written is not None and not quiet:
        doubt = ", although the gate did not pass" if found.verdict.exit_code else ""
        typer.echo(f"baseline written: {found.written}{doubt}", err=True)
    return found.verdict.exit_code


def _explain(code: str) -> None:
    from moegeom.check.pages import find_check, page_of
    from moegeom_cli.check_pages import render_page

    typer.echo(render_page(page_of(find_check(code)), width()))


def _init() -> None:
    from moegeom.check.profile_file import PROFILE_NAME
    from moegeom.check.profile_template import profile_template
    from moegeom.core.errors import UsageError

    path = Path(PROFILE_NAME)
    if path.exists():
        raise UsageError(f"{path} exists already.", "Remove it first, or edit it.")
    try:
        path.write_text(profile_template(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from error
    typer.echo(f"wrote {path}", err=True)
