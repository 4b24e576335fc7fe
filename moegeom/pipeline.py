"""The main road: a checkpoint and tokens in, a results directory out.

Read :func:`scan` first; each line of it is a stage with a folder of its own.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.checkpoint.remote.url import scheme_of
from moegeom.checks import NO_NAME, judge, measured_results
from moegeom.core.errors import InternalError, RouterError, UsageError
from moegeom.core.files import read_regular
from moegeom.core.metric import Metric
from moegeom.core.router import Router, RouterSet
from moegeom.core.row_keys import AS_STORED, is_domain
from moegeom.core.text import number_of
from moegeom.core.tokens import TILE, SourceFacts, TokenSource
from moegeom.engine.checkpoint_b import CheckpointB, open_checkpoint_b
from moegeom.engine.choice import ChoicesAlone
from moegeom.engine.cluster import parts_by_ray
from moegeom.engine.devices.choice import ON_THE_PROCESSOR, DeviceChoice, choose_devices
from moegeom.engine.out import (
    RUNS,
    believes_results,
    default_out,
    early_out,
    is_answered,
    is_answered_unread,
    refuse_skipped,
)
from moegeom.engine.parts import (
    Folding,
    MergedParts,
    MissingParts,
    PartWriter,
    parameters_of_part,
    parse_part,
)
from moegeom.engine.request import MergeRequest, ScanRequest, Terms, Watch, tokens_text
from moegeom.engine.run_facts import (
    arithmetic_facts,
    checkpoint_b_facts,
    column_versions,
    explain_command,
    initialised_facts,
    plain,
    plan_facts,
    refused_facts,
    run_b_facts,
    run_facts,
    variant_rows,
)
from moegeom.engine.session import Session
from moegeom.engine.sources import (
    first_pass_of,
    in_step,
    open_run_b,
    refuse_no_rows,
    refuse_no_tokens,
    refuse_too_many,
    refuse_uncomparable,
)
from moegeom.engine.trust import Trust
from moegeom.measure.finish import (
    MeasuredRouter,
    measure_counts,
    measure_weights,
    measure_weights_of,
)
from moegeom.measure.passes import RouterRun, measure_in_step, with_what_ifs
from moegeom.metrics import METRICS, by_topic, metrics_of_scan
from moegeom.results.reader import MemoryResults, Results, open_results
from moegeom.router.expert_functions import CountedExperts, open_expert_functions
from moegeom.router.facts import token_table_facts
from moegeom.tokens.traces.alignment import RunB
from moegeom.tokens.traces.source import CountedSource
from moegeom.variants.what_if import parse_what_ifs

if TYPE_CHECKING:
    from moegeom.results.writer import ResultsWriter


def scan(
    request: ScanRequest,
    watch: Watch | None = None,
    opened: Session | None = None,
    merged: MergedParts | None = None,
) -> Path:
    """Measures every router on the tokens and returns the results directory.

    ``opened`` is the session of this request, where there is one already; ``merged`` are parts in
    which its tokens were folded before.

    Raises
    ------
    MoeGeomError
        One of its subclasses, by stage; nothing is left at ``request.out`` then.
    """
    from moegeom.results.writer import (
        ResultsWriter,
    )  # pyarrow, which a check of weights need not have

    if request.part is not None:
        parameters_of_part(request)  # what cannot be told to whoever merges is refused at once
    metrics = metrics_for(request)
    columns = column_versions(METRICS.all())
    is_believed = believes_results(request, request.out or RUNS)
    if not is_believed:
        request = dataclasses.replace(request, restart=True)
    if opened is None:
        has_tokens = request.tokens is not None
        opened = Session.of(request.checkpoint, request, with_listed=has_tokens, with_varying=True)
        early = early_out(request, opened.routers.fingerprint)
        if is_believed and early and is_answered_unread(early, request, opened.routers, columns):
            return _answered(early, watch)
        opened = with_tokens(request, opened, watch)
    routers, chosen, source = opened.routers, opened.chosen, opened.source
    token_facts = None if source is None else source.facts
    checkpoint_b = open_checkpoint_b(request, source, [r for r in chosen if not r.listed])
    run_b = open_run_b(request, source, routers.routers)
    device = choose_devices(request.device or "auto", token_facts, len(chosen))
    if watch and (device.devices or request.device == "auto"):
        watch.say(device.text)
    plan = plan_facts(request, routers, token_facts, device.kind, columns, checkpoint_b)
    out = early_out(request, routers.fingerprint) or request.out or default_out(request, plan)
    if is_answered(out, plan, request):
        if is_believed:
            return _answered(out, watch)
        if watch:
            watch.say(f"{out}: measured again, as it lies in the working tree of what is judged.")
        request = dataclasses.replace(request, overwrite=True)
    if source is None:
        refuse_no_tokens(request)
    refuse_no_rows(request, source)
    refuse_uncomparable(request, chosen, source)
    refuse_too_many(token_facts)
    setting = ScanSetting(request, opened, metrics, watch, run_b, checkpoint_b, device, merged)
    if merged is not None:
        plan = merged.same_plan(plan)
    if request.part is not None:
        return _scan_part(setting, plan, out)
    if request.engine is not None:
        with parts_by_ray(request, source, _part_files, watch) as parts:
            return scan(dataclasses.replace(request, engine=None), watch, opened, parts)
    with ResultsWriter(out, plan, by_topic(metrics), request.restart, request.overwrite) as writer:
        if watch:
            work = _work(chosen, source, setting.num_passes)
            watch.start(sum(work.values()))
            if done := writer.finished():
                watch.say(
                    f"going on in {out}.partial: {len(done)} of {len(chosen)} routers are done"
                )
                watch.advance(sum(work[name] for name in done))
        for group in in_step(chosen, setting.sources):
            measure(group, setting, writer)
        facts = opened.facts(chosen) | _facts(request) | dict(routers.claims)
        facts |= {
            "token_tables": token_table_facts(opened.store, routers.tables),
            "initialised": initialised_facts(routers, chosen),
            "run_b": None if run_b is None else run_b_facts(run_b),
            "checkpoint_b": None if checkpoint_b is None else checkpoint_b_facts(checkpoint_b),
            "next_command": explain_command(request),
            "device": device.facts(),
        }
        return finish(writer, chosen, request, routers, facts)


def _scan_part(setting: ScanSetting, plan: Mapping[str, Any], out: Path) -> Path:
    """The passes of every router over the share of one part: a folder for :func:`merge`."""
    request, watch, source = setting.request, setting.watch, setting.opened.source
    part = parse_part(request.part or "")
    if source is None or isinstance(source, CountedSource):
        raise UsageError("--part cuts tokens: it needs --tokens with the choices of each.")
    heard = [r for r in setting.opened.chosen if r.name in source.facts.routers]
    if request.out is None:
        out = out.with_name(f"{out.name}.part-{part.number}-of-{part.count}")
    num_tiles = -(-source.facts.num_tokens // TILE)
    with PartWriter(out, part, request, plan, num_tiles) as writer:
        if watch:
            share = len(part.tiles(range(num_tiles), num_tiles)) * TILE
            watch.start(len(heard) * share * setting.num_passes)
        folding = dataclasses.replace(setting, folding=writer)
        for group in in_step(heard, setting.sources):
            for _ in _measured([RouterJob(router) for router in group], folding):
                pass  # what it folded is written
    return out


#: Bytes of the states of one pass that a worker sends.
_MOST_STATE = 1 << 33


def _part_files(request: ScanRequest) -> dict[str, bytes]:
    """A part as the contents of its files by name: what a worker of a cluster sends back."""
    with tempfile.TemporaryDirectory(prefix="moegeom-") as folder:
        written = scan(dataclasses.replace(request, out=Path(folder) / "part"))
        return {path.name: read_regular(path, _MOST_STATE) for path in written.iterdir()}


def merge(request: MergeRequest, watch: Watch | None = None) -> Path | MissingParts:
    """The results of parts that were folded apart, equal to those of one scan; or what is missing.

    Checkpoint and tokens are opened again, and read for what belongs to no tile. They are where the
    first part says, or where the request does.

    Raises
    ------
    ResultsError
        When a folder is no part, parts are of different scans, or one is not as it was written.
    """
    parts = MergedParts.of(request.parts)
    if isinstance(parts, MissingParts):
        return parts
    whole = parts.parts[0].request
    if request.checkpoint is None and scheme_of(whole.checkpoint):
        raise UsageError(
            f"the parts are of {whole.checkpoint[:200]}, and a merge fetches nothing that a part "
            "names.",
            "Name it: moegeom merge PART... --from URL.",
        )
    whole = dataclasses.replace(
        whole,
        checkpoint=whole.checkpoint if request.checkpoint is None else request.checkpoint,
        tokens=whole.tokens if request.tokens is None else request.tokens,
        out=request.out,
        overwrite=request.overwrite,
    )
    return scan(whole, watch, merged=parts)


def _answered(out: Path, watch: Watch | None) -> Path:
    if watch:
        watch.say(f"{out}: the results of this very request; --overwrite measures again.")
    return out


def with_tokens(request: ScanRequest, opened: Session, watch: Watch | None = None) -> Session:
    """The session with the tokens of a scan; a first pass over many files is gone on with."""
    with first_pass_of(request, opened.routers, watch.say if watch else None) as company:
        return opened.on(request.tokens, company)


def _work(routers: Sequence[Router], source: TokenSource | None, passes: int) -> dict[str, int]:
    """How far a bar of progress moves for each router: a token of each pass, or the router itself
    where there are no tokens.
    """
    if source is None:
        return {router.name: 1 for router in routers}
    of_each = passes * source.facts.num_tokens
    return {r.name: of_each if r.name in source.facts.routers else 0 for r in routers}


def results_of(
    request: ScanRequest,
    watch: Watch | None = None,
    run: Callable[[Any, Watch | None], Path] = scan,
) -> Results:
    """What ``run`` measures: in the directory ``request.out``, or in memory where that is None.

    Raises
    ------
    MoeGeomError
        As ``run``; UsageError where rows by token, which are files, have no directory.
    """
    if request.part is not None:
        raise UsageError(
            f"--part {request.part}: a share of the tokens has no results of its own.",
            "moegeom scan ... --part i/n --out FOLDER writes it; merge adds parts up.",
        )
    if request.out is not None:
        return open_results(run(request, watch))
    if request.per_token:
        raise UsageError("--per-token writes a file for each router.", "Name a folder: --out.")
    with tempfile.TemporaryDirectory(prefix="moegeom-") as folder:
        on_disk = dataclasses.replace(request, out=Path(folder) / "results")
        return open_results(run(on_disk, watch)).in_memory()


def metrics_for(request: ScanRequest) -> list[Metric]:
    """The metrics that a request asks for."""
    return metrics_of_scan(request.compares, bool(request.noise), request.experts)


def write_folded(
    request: ScanRequest,
    routers: RouterSet,
    token_facts: SourceFacts,
    trust: Trust | None,
    measured: Mapping[str, MeasuredRouter],
    started: float,
    device: DeviceChoice = ON_THE_PROCESSOR,
) -> Path:
    """A results directory from routers that were measured while a model ran: no second pass.

    ``measured`` holds one entry by router name, ``started`` is a time of ``perf_counter``;
    ``device`` is what folded the pass over all tokens.
    """
    from moegeom.results.writer import ResultsWriter

    chosen = [router for router in routers.routers if router.name in measured]
    metrics = metrics_for(request)
    columns = column_versions(METRICS.all())
    plan = plan_facts(request, routers, token_facts, device.kind, columns)
    out = request.out or default_out(request, plan)
    with ResultsWriter(out, plan, by_topic(metrics), request.restart, request.overwrite) as writer:
        for router in chosen:
            part = measured[router.name]
            writer.add_part(router.name, writer.new_part(router.name), part.rows, part.facts)
        facts = run_facts(routers, chosen, token_facts, trust) | _facts(request)
        facts |= {**routers.claims, "seconds": time.perf_counter() - started}
        facts |= {"device": device.facts()} if device.devices else {}
        return finish(writer, chosen, request, routers, facts)


def _facts(request: ScanRequest) -> dict[str, Any]:
    """What of the request a reader of the results has to know."""
    return {
        "arithmetic": arithmetic_facts(request.backend),
        "layers_requested": request.layers,
        "exclude_first": request.exclude_first,
        "reference": request.reference,
        "noise": plain(request.noise or {}),
        "column_versions": column_versions(metrics_for(request)),
    }


def lint(
    checkpoint: str,
    terms: Terms | None = None,
    opened: Session | None = None,
    watch: Watch | None = None,
) -> MemoryResults:
    """What the weights alone tell, judged at once and never written; of ``opened``, if it is.

    A router that cannot be read is a finding of the gate, not the end of it, where a check stands
    for the reason: ``run["refused"]`` holds it, and there are no rows.
    """
    try:
        opened = opened or Session.of(checkpoint, terms or Terms(), with_varying=True)
    except RouterError as refusal:
        if not refusal.code:
            raise
        return MemoryResults(refused_facts(refusal), {})
    routers, chosen = opened.routers, opened.chosen
    judged = (metric for metric in METRICS.all() if not metric.is_for_figures)
    metrics = [metric for metric in judged if metric.scope == "weights"]
    if watch:
        watch.start(len(chosen))
    measured = []
    for part in measure_weights_of([(router, metrics) for router in chosen]):
        measured.append(part.rows)
        if watch:
            watch.advance(1)
    tables = {
        table: [row for rows in measured for row in rows.get(table, ())]
        for table in ("layers", "experts")
    }
    facts = opened.facts(chosen) | {
        **routers.claims,
        "token_tables": token_table_facts(opened.store, routers.tables),
        "initialised": initialised_facts(routers, chosen),
        "column_versions": column_versions(metrics),
    }
    return MemoryResults(facts, tables)


@dataclass(frozen=True)
class ScanSetting:
    """What is the same for every router: request, checkpoint, tokens and metrics, choices of
    another run, routers of another checkpoint, devices, and where the progress of passes comes
    from, if not from a loop here.
    """

    request: ScanRequest
    opened: Session
    metrics: Sequence[Metric]
    watch: Watch | None = None
    run_b: RunB | None = None
    checkpoint_b: CheckpointB | None = None
    device: DeviceChoice = ON_THE_PROCESSOR
    folding: Folding | None = None

    def metrics_of(self, router: Router) -> Sequence[Metric]:
        """Where choices alone are known of a router, no figure of weights."""
        if not router.listed:
            return self.metrics
        return [metric for metric in self.metrics if metric.scope != "weights"]

    @property
    def sources(self) -> tuple[TokenSource | None, ...]:
        """What holds tokens: that of the scan, and that of the other run."""
        return self.opened.source, None if self.run_b is None else self.run_b.source

    @property
    def num_passes(self) -> int:
        """Passes over all tokens."""
        request = self.request
        others = (self.run_b is not None) + (self.checkpoint_b is not None)
        return 1 + len(request.arithmetics) + others + len(parse_what_ifs(request.what_ifs))

    def experts(self, router: Router) -> CountedExperts | None:
        """The experts behind a router; None unless they are asked for."""
        if not self.request.experts or router.listed:
            return None
        return CountedExperts(open_expert_functions(self.opened.store, router))


@dataclass(frozen=True)
class RouterJob:
    """A router to measure, and where what it leaves is kept."""

    router: Router
    folder: Path | None = None
    snapshot: Path | None = None


def measure(routers: Sequence[Router], setting: ScanSetting, writer: ResultsWriter) -> None:
    """Routers that read the tokens together through everything; not those that an earlier run
    finished.
    """
    jobs: list[RouterJob] = []
    is_quick = setting.opened.source is None  # what weights tell is measured sooner than written
    for router in routers:
        if writer.has_part(router.name):
            done = {router.name: writer.part_facts(router.name)}
            refuse_skipped(
                setting.request, done, "the unfinished results", "begin again with --restart"
            )
        elif is_quick:
            jobs.append(RouterJob(router))
        else:
            snapshot = writer.snapshot_path(router.name, "as_stored")
            jobs.append(RouterJob(router, writer.new_part(router.name), snapshot))
    for one, measured in zip(jobs, _measured(jobs, setting), strict=True):
        if one.folder is None:
            writer.hold(one.router.name, measured.rows, measured.facts)
        else:
            writer.add_part(one.router.name, one.folder, measured.rows, measured.facts)


def _measured(jobs: Sequence[RouterJob], setting: ScanSetting) -> Iterator[MeasuredRouter]:
    """Each of them in turn. Only those whose choices are read together, and those without tokens,
    are more than one.
    """
    source, watch = setting.opened.source, setting.watch
    if source is None:
        pairs = [(one.router, setting.metrics_of(one.router)) for one in jobs]
        for measured in measure_weights_of(pairs):
            yield measured
            if watch:
                watch.advance(1)
        return
    runs: list[RouterRun] = []
    experts: list[CountedExperts | None] = []
    for one in jobs:
        router, metrics = one.router, setting.metrics_of(one.router)
        if router.name not in source.facts.routers:
            yield measure_weights(router, metrics, f"{source.facts.name} does not record it")
        elif isinstance(source, CountedSource):
            yield measure_counts(router, source.counts(router.name), metrics)
        else:
            experts.append(setting.experts(router))
            runs.append(_run_of(one, source, setting, experts[-1]))
    if not runs:
        return
    if watch:
        first, others = runs[0].router.name, len(runs) - 1
        watch.begin(f"{first} and {number_of(others, 'other')}" if others else first)
    for run, measured, mixed in zip(runs, measure_in_step(runs), experts, strict=True):
        if mixed is not None:
            measured.facts.update(mixed.facts)
        yield with_what_ifs(run, measured) if setting.request.what_ifs else measured


def _run_of(
    one: RouterJob, source: TokenSource, setting: ScanSetting, experts: CountedExperts | None
) -> RouterRun:
    """A router on tokens."""
    router, side, watch = one.router, setting.checkpoint_b, setting.watch
    return RouterRun(
        router,
        ChoicesAlone(source) if router.listed else source,
        setting.metrics_of(router),
        setting.request,
        run_b=setting.run_b,
        checkpoint_b=None if side is None else side.routers.get(router.name),
        folder=one.folder,
        snapshot=one.snapshot,
        devices=setting.device.devices,
        advanced=watch.advance if watch else None,
        on_message=watch.say if watch else None,
        experts=None if experts is None else experts.mixed,
        folding=setting.folding,
    )


def finish(
    writer: ResultsWriter,
    measured_routers: Sequence[Router],
    request: ScanRequest,
    routers: RouterSet,
    facts: Mapping[str, Any],
) -> Path:
    """Judges what was measured and moves the results into place."""
    names = [router.name for router in measured_routers]
    parts = {name: writer.part_facts(name) for name in names}
    layers, experts = (writer.gather(n, names).to_pylist() for n in ("layers", "experts"))
    reasons = {name: part["reasons"] for name, part in parts.items()}
    tokens, options = tokens_text(request.tokens) or NO_NAME, request.typed_again()
    run = {**facts, "parts": parts}
    results = MemoryResults(run, {"layers": layers, "experts": experts})
    measured = measured_results(results, request.checkpoint, tokens, options=options)
    findings, codes = judge(measured, reasons, routers.notes)
    refuse_disproved(layers)
    folders = [writer.part_folder(name) for name in names]
    sides = facts.get("run_b"), facts.get("checkpoint_b")
    domains = {
        row["population"]: row["num_tokens"]
        for row in layers
        if row["variant"] == AS_STORED and is_domain(row["population"])
    }
    others = {
        "domains": [{"population": name, "num_tokens": number} for name, number in domains.items()],
        "variants": variant_rows(layers, request, *sides, folders),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "whatif": [
            {"router": router, "variant": name, "quantity": quantity, "value": value}
            for router, part in parts.items()
            for name, tried in part.get("what_ifs", {}).items()
            for quantity, value in tried.get("figures", {}).items()
        ],
    }
    run = {"plan": writer.plan, "parts": parts, **codes, "seed": request.seed}
    return writer.finish(names, run | dict(facts), others)


def refuse_disproved(layers: Sequence[Mapping[str, Any]]) -> None:
    """Raises InternalError where tokens flipped although it was proved that they stay."""
    for row in layers:
        if wrong := row.get("num_disproved"):
            raise InternalError(
                f"{row['router']}, {row['variant']}: {wrong} tokens flipped that were proved to "
                "stay; please report"
            )
