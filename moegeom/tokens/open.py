"""Opening any token file that moegeom knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moegeom.core.errors import RecordingError, UsageError, about
from moegeom.core.files import reading
from moegeom.core.loaded_code import refuse_code_within
from moegeom.core.tokens import Stage, TokenSource
from moegeom.tokens.files import TokenFiles, name_of, paths_of, refuse_damaged
from moegeom.tokens.foreign.npy import npy_shape, npz_shapes
from moegeom.tokens.source import SOURCES, Company, KnownRouter, Request, Source
from moegeom.tokens.sources.recorded import holds_traces, open_traces, recognises
from moegeom.tokens.stages import STAGE_TENSORS, stage_of
from moegeom.tokens.traces.trace import DIALECTS, find_dialect

#: What else people store hidden states in.
_PICKLES: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def open_tokens(
    path: str | Path | TokenFiles,
    stage: str | None = None,
    router_map: Mapping[str, str] | None = None,
    routers: tuple[str, ...] = (),
    checkpoint_routers: tuple[KnownRouter, ...] = (),
    dialect: str | None = None,
    expert_map: str | None = None,
    company: Company | None = None,
) -> TokenSource:
    """The token source at ``path``: a recording, a trace, or a foreign file whose stage is given.

    A pattern (``dump/*.pt``), a folder of traces and several paths are one source of traces. The
    other parameters are those of ``Request``; that of a recording is checked against ``stage``.

    A key of ``router_map`` is that of a foreign array; one that is a router name (``text/0``) or
    its file form (``text.0``) needs no entry, nor does the only array when there is one router.

    Raises
    ------
    UsageError
        When the stage of a foreign file is missing or contradicts the recording.
    RecordingError
        When the file is unreadable or its arrays cannot be assigned to routers.
    """
    named = path.paths[0] if isinstance(path, TokenFiles) else path
    with about("tokens", named):
        of_stage, by_key = stage_of(stage), dict(router_map or {})
        request = Request(
            of_stage, by_key, routers, checkpoint_routers, dialect, expert_map, company
        )
        with reading(Path(named), RecordingError):
            paths = paths_of(path)
            refuse_code_within(*paths)
            opened = _opened(paths[0], request) if len(paths) == 1 else _of_several(paths, request)
            _check_expectations(opened, request.stage, request.routers)
            return opened


def _opened(path: Path, request: Request) -> TokenSource:
    source = _recognise(path, request)
    if source.needs_stage and request.stage is None:
        raise UsageError(
            f"{path.name}: {source.name} files do not say what their numbers are.",
            f"Add --stage, one of {', '.join(STAGE_TENSORS)}.",
        )
    if request.router_map and not source.needs_stage:
        raise UsageError(f"{path.name} names its routers itself; a router map does not apply.")
    if request.expert_map is not None and source.name != "trace":
        raise UsageError(
            f"{path.name} is no trace of an engine; --expert-map does not apply.",
            "Recordings, and arrays of ids, name the experts of the checkpoint.",
        )
    return source.open(path, request)


def _of_several(paths: Sequence[Path], request: Request) -> TokenSource:
    """One source from several trace files; other kinds of files cannot be joined."""
    first = paths[0]
    if request.stage not in (None, "ids") or request.router_map:
        raise UsageError(
            f"{name_of(paths)}: several files are read where they are "
            "traces, which hold ids of experts and name their routers.",
            "Give one file, without pattern.",
        )
    if not recognises(first) and request.dialect is None:
        raise RecordingError(
            f"{first.name} is no trace that can be told; several files are one source where each "
            f"is a trace ({', '.join(DIALECTS.names())}).",
            "moegeom merge puts recordings together; --dialect says whose traces they are.",
        )
    if request.dialect is None and _is_stack_of_ids(first, request):
        raise UsageError(
            f"{first.name}: reads as [layers, tokens, k]; several files are read as "
            "[tokens, layers, k].",
            "--dialect vllm, if they are that.",
        )
    return open_traces(paths, request)


def _recognise(path: Path, request: Request) -> Source:
    stage, dialect = request.stage, request.dialect
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        hint = f"{partial.name} exists: it was never finished." if partial.exists() else ""
        raise RecordingError(f"{path.name}: no such file or directory.", hint)
    refuse_damaged(path)
    # first of all, since a folder may be a recording and an array may be one router's
    is_trace = find_dialect(path, dialect) is not None or holds_traces(path)
    if stage in (None, "ids") and is_trace:
        if dialect is not None or not _is_stack_of_ids(path, request):
            return SOURCES["trace"]
    elif dialect is not None:
        raise UsageError(f"A trace ({dialect}) holds ids of experts, not stage {stage}.")
    for source in SOURCES.all():
        if source.recognises(path):
            return source
    raise RecordingError(
        f"{path.name}: not a kind of token file that moegeom knows ({', '.join(SOURCES.names())}), "
        f"nor a trace that it can tell ({', '.join(DIALECTS.names())}).",
        "A pickle is never opened, because it can run code: save with np.savez, safetensors, or "
        "torch.save of tensors."
        if path.suffix.lower() in _PICKLES
        else "Which traces of engines are read, and how to save what you have: docs/start.md.",
    )


def _is_stack_of_ids(path: Path, request: Request) -> bool:
    """Whether integers of three axes are [routers, tokens, k] rather than a trace.

    Raises
    ------
    UsageError
        When the first axis is as long as there are routers, and nobody said what it is, or the
        second may be that of the layers.
    """
    shape, routers, stage = _shape_of_one_array(path), request.checkpoint_routers, request.stage
    if not (routers and shape and shape[0] in (len(routers), len(request.routers) or None)):
        return False
    may_be_trace = shape[1] in (len(routers), max(router.layer for router in routers) + 1)
    if stage == "ids" and not may_be_trace:
        return True
    if stage is None and may_be_trace:
        return False
    raise UsageError(
        f"{path.name}: one array of integers of shape {shape}; its first axis is as long "
        f"as there are routers ({shape[0]}), and may be layers or tokens.",
        "--dialect vllm reads it as [tokens, layers, k]"
        + (
            "; for [layers, tokens, k] save one array for each router: "
            "np.savez(file, **{'text.3': array, ...})."
            if may_be_trace
            else ", --stage ids as [layers, tokens, k]."
        ),
    )


def _shape_of_one_array(path: Path) -> tuple[int, ...] | None:
    """The shape of the only array of a NumPy file, if it is integers of three axes."""
    if not path.is_file() or path.suffix not in (".npy", ".npz"):
        return None
    shapes = [npy_shape(path)] if path.suffix == ".npy" else list(npz_shapes(path).values())
    return shapes[0] if len(shapes) == 1 and len(shapes[0] or ()) == 3 else None


def _check_expectations(opened: TokenSource, stage: Stage | None, routers: tuple[str, ...]) -> None:
    facts = opened.facts
    if stage is not None and stage != facts.stage:
        raise UsageError(f"{facts.name} was recorded at stage {facts.stage}, not {stage}.")
    if routers and not set(routers) & set(facts.routers):
        raise RecordingError(
            f"{facts.name} holds routers {', '.join(facts.routers[:8])}; "
            f"the checkpoint has {', '.join(routers[:8])}: none in common.",
            "It was recorded from another model.",
        )
