"""What Python programs call: ``import moegeom as mg``, and a function for each command.

Paths are texts or ``Path``; a checkpoint is also what :func:`open` returned, tokens are also what
:func:`recording` returned, arrays, or tensors. Every other parameter has the name of the field of
the request that it fills. A function raises ``MoeGeomError``, or one of its kinds, with what was
found, what was expected and what to try.

Functions that measure take ``watch``, which is told how the work goes on: an object with
``start(num_tokens)``, ``begin(what)``, ``advance(num_tokens)`` and ``say(text)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegeom.core.errors import ResultsError
from moegeom.core.router import Router, format_layers
from moegeom.document.report import GateReport, Report, ScanReport
from moegeom.engine.parameters import asks, family_parameters, request_of
from moegeom.engine.request import MergeRequest, ScanRequest, Terms
from moegeom.results.reader import open_results
from moegeom.router.requested_family import NOTHING_ASKED
from moegeom.studies.check.record import GateRequest
from moegeom.studies.opened import Checkpoint, Recording, asked_request, of_steps, of_tokens, side
from moegeom.studies.routes.record import RoutesRequest
from moegeom.studies.track.record import TrackRequest
from moegeom.tokens.files import TokenFiles, are_there

if TYPE_CHECKING:
    from moegeom.core.series import Series
    from moegeom.engine.route import RoutedTokens
    from moegeom.pipeline import Watch
    from moegeom.studies.check.record import Gate
    from moegeom.studies.routes.record import Routes

#: Parameters that say what the tokens are, and which of their tests are waived.
_OF_TOKENS = ("stage", "dialect", "expert_map", "router_map", "stale_inputs", "unverified")

#: Parameters that say which routers of a checkpoint, how to read them and how to fetch it.
_OF_MODEL = ("layers", "remote", *family_parameters(NOTHING_ASKED))


# ---------------------------------------------------------------------------- what is looked at


@asks(Terms, *_OF_MODEL)
def open(path: str | Path, **options: Any) -> Checkpoint:  # noqa: A001 - mg.open
    """A checkpoint: a folder, a file, or a URL such as ``hf://owner/name``.

    Headers are read now, routers when they are first asked for, other tensors never.

    Raises
    ------
    CheckpointError
        When nothing readable is there.

    Examples
    --------
    >>> import moegeom as mg
    >>> mg.open("sample_ckpts/olmoe-balanced/step_1500")
    sample_ckpts/olmoe-balanced/step_1500  olmoe: softmax, top 4 of 16; rule assumed from config.
    router  experts  top_k  hidden  stored  selection
    text/0       16      4      64    bf16      logit
    text/1       16      4      64    bf16      logit
    text/2       16      4      64    bf16      logit
    """
    checkpoint = Checkpoint(os.fspath(path), request_of(Terms, **options))
    _ = checkpoint.store
    return checkpoint


@asks(Terms, *_OF_TOKENS)
def recording(tokens: Any, **options: Any) -> Recording:
    """Tokens to route: a recording, a trace of an engine, another file, or arrays in memory.

    Traces may be many files: a pattern such as ``dump/*.pt``, a folder, or a list of paths.

    Arrays are [tokens, width] by name of the router, all routers in one [layers, tokens, width] or
    in a list; beside them ``document``, ``position`` and ``token_id``, one integer for each token.
    ``stage`` says what the numbers are: ``router_input`` (behind the norm), ``pre_norm``,
    ``logits``, or ``ids`` of the chosen experts.

    Raises
    ------
    RecordingError
        When there is no such file, or no array.

    Examples
    --------
    >>> import moegeom as mg
    >>> rec = mg.recording("sample_ckpts/olmoe-balanced/rec/step_1500")
    >>> rec.open().facts.num_tokens
    4096
    """
    source = of_tokens(tokens)["tokens"]
    if isinstance(source, str | TokenFiles) and not are_there(source):
        from moegeom.tokens.open import open_tokens

        open_tokens(source)
    return Recording(source, options)


# ----------------------------------------------------------------------------- what is measured


@asks(ScanRequest)
def scan(
    checkpoint: str | Path | Checkpoint,
    tokens: Any = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> ScanReport:
    """Every router measured on the tokens; without tokens, what its weights tell.

    Results stay in memory, or are kept in the folder ``out``, where those of the same request are
    the answer.

    Raises
    ------
    MoeGeomError
        By what cannot be read, or be believed: see its kinds.

    Examples
    --------
    >>> import moegeom as mg
    >>> sample = "sample_ckpts/olmoe-collapsed"
    >>> res = mg.scan(f"{sample}/step_1500", f"{sample}/rec/step_1500")
    >>> [finding.code for finding in res.findings if finding.severity == "warning"]
    ['MGB201', 'MGB203', 'MGB203', 'MGG302']
    >>> [round(share, 2) for share in res.layers()["load_cv_ddof0"].to_pylist()]
    [0.94, 0.96, 0.94]
    >>> res.table("experts").to_pandas()["expert"].nunique()
    16
    """
    from moegeom.document.results import results_document
    from moegeom.pipeline import results_of

    request = asked_request(ScanRequest, side("checkpoint", checkpoint), tokens, options)
    return ScanReport(results_of(request, watch), results_document)


@asks(MergeRequest)
def merge(
    parts: Iterable[str | Path],
    *,
    checkpoint: str | Path | None = None,
    tokens: str | Path | None = None,
    watch: Watch | None = None,
    **options: Any,
) -> ScanReport:
    """The results of parts that ``moegeom scan ... --part i/n`` wrote, equal to those of one scan.

    Raises
    ------
    ResultsError
        When a part is missing, is of another scan, or is not as it was written.
    """
    from moegeom.document.results import results_document
    from moegeom.engine.parts import MissingParts
    from moegeom.pipeline import merge as merged_parts

    sides = {"parts": parts, "checkpoint": checkpoint, "tokens": tokens}
    merged = merged_parts(request_of(MergeRequest, **sides, **options), watch)
    if isinstance(merged, MissingParts):
        missing = format_layers(set(merged.numbers))
        raise ResultsError(f"parts {missing} of {merged.count} are missing.", "Make them first.")
    return ScanReport(open_results(merged), results_document)


@asks(Terms)
def report(results: str | Path | ScanReport) -> ScanReport:
    """Results that were kept, on this machine or another.

    Raises
    ------
    ResultsError
        When there are none, or none of this version.
    """
    from moegeom.document.results import results_document

    if isinstance(results, ScanReport):
        return results
    return ScanReport(open_results(results), results_document)


@asks(GateRequest)
def check(
    checkpoint: str | Path | Checkpoint | ScanReport,
    tokens: Any = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> GateReport[Gate]:
    """May this checkpoint ship? True where the gate is passed, as exit code 0 of the command.

    ``checkpoint`` may be results of a scan, kept or in memory. ``baseline`` is a file to compare
    with, ``profile`` one that says how to judge, ``select`` names checks and ``fail_on`` the least
    severity that fails. ``experts`` reads a sample of each expert, and judges whether they differ.

    Raises
    ------
    MoeGeomError
        By what cannot be read; what can be and is wrong is a finding.

    Examples
    --------
    >>> import moegeom as mg
    >>> verdict = mg.check("sample_ckpts/olmoe-balanced/step_1500")
    >>> bool(verdict), verdict.exit_code
    (True, 0)
    """
    from moegeom.studies.check.document import document
    from moegeom.studies.check.study import gate

    request = asked_request(
        GateRequest, side("target", checkpoint, takes_held=True), tokens, options
    )
    return GateReport(gate(request, watch), document)


@asks(Terms)
def route(router: Router, inputs: Any) -> RoutedTokens:
    """What a router chooses for ``inputs`` [tokens, hidden], an array or a tensor, behind its norm.

    ``chosen`` [tokens, slots] are experts, -1 in an empty slot; ``num_chosen`` [tokens],
    ``weights`` [tokens, slots]; ``margin`` [tokens] in the unit of the selection scores;
    ``boundary_distance`` [tokens], Euclidean, in the space of the inputs.

    Raises
    ------
    UsageError
        When the inputs have another shape.
    NonFiniteError
        When an input or its logits are not finite.
    RouterRuleError
        When the choice does not follow from router and input.

    Examples
    --------
    >>> import moegeom as mg
    >>> import numpy as np
    >>> router = mg.open("sample_ckpts/olmoe-balanced/step_1500").routers[0]
    >>> routed = mg.route(router, np.linspace(-1.0, 1.0, 128).reshape(2, 64))
    >>> routed
    RoutedTokens(2 tokens, 4 slots; nothing unknown)
    >>> routed.chosen.shape, routed.weights.shape, routed.boundary_distance.shape
    ((2, 4), (2, 4), (2,))
    """
    from moegeom.engine.route import route as routed

    return routed(router, inputs)


@asks(TrackRequest)
def track(
    checkpoints: str | Path | Iterable[str | Path],
    tokens: str | Path | Mapping[str, Any] | None = None,
    *,
    watch: Watch | None = None,
    **options: Any,
) -> Report[Series]:
    """A training run checkpoint by checkpoint: load, entropy, margins, drift and overlap.

    ``checkpoints`` is a pattern such as ``step_*``, or several paths; ``tokens`` names the
    recording of each step, ``rec/step_{step}``, or is a mapping from the name of a checkpoint to
    its tokens. Steps are kept in ``out``, by default ``runs/<folder>.track``, and are measured
    once; a token source of your own is measured each time.

    Raises
    ------
    MoeGeomError
        Naming the step.
    """
    from moegeom.studies.track.document import document
    from moegeom.studies.track.study import track as tracked

    request = request_of(TrackRequest, patterns=checkpoints, **of_steps(tokens) | options)
    return Report(tracked(request, watch), document)


@asks(RoutesRequest, "dialect")
def routes(files: str | Path | Iterable[str | Path], **options: Any) -> Report[Routes]:
    """What traces of engines and trainers hold, and what is wrong with them, without a checkpoint.

    The value is what was found in each file; its ``exit_code`` is 0 when all are sound, 1 when one
    has defects, 4 when one says too little to judge.

    Raises
    ------
    RecordingError
        When a file is not there, or no trace that can be told.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import moegeom as mg
    >>> ids = np.array([[[0, 2], [1, 3]], [[1, 2], [3, 0]], [[3, 3], [1, 2]]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/routes.npz", request=ids)
    ...     found = mg.routes(f"{folder}/routes.npz").value
    >>> found.exit_code, found.files[0].defects[0].request
    (1, 'request')
    """
    from moegeom.studies.routes.document import document
    from moegeom.studies.routes.study import routes as described

    several = [files] if isinstance(files, str | Path) else files
    request = request_of(RoutesRequest, files=tuple(os.fspath(f) for f in several), **options)
    return Report(described(request), document)
