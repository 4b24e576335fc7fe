"""The first pass over the files of a trace: what is a token, and what is to be said about the rest.

Files are read one after the other. Of the facts of all of them follow the axes, repeated requests,
counts and notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from moegeom.core.errors import RecordingError
from moegeom.core.identity import Identity
from moegeom.core.text import number_of
from moegeom.tokens.source import Company, KnownRouter
from moegeom.tokens.traces.axes import Axes, Survey, axes_of
from moegeom.tokens.traces.file_facts import (
    FileFacts,
    FileOf,
    Manner,
    TraceFile,
    facts_of,
    listed,
)
from moegeom.tokens.traces.trace import BEGINNING, Notes, RequestTrace

#: A first pass of which nothing is kept and nobody hears.
ALONE = Company()


@dataclass(frozen=True, eq=False)
class PlacedFiles:
    """What the first pass over all files found.

    ``identities`` are those of ``files`` when they were read. ``starts`` is the first token of each
    piece, and behind them the number of all; ``file`` and ``place`` say where a piece lies.
    A part is the rows of a request in a piece, those of a piece are from ``first_part`` on:
    ``document`` numbers its request in the order of tokens, -1 where it is left out.
    """

    files: tuple[TraceFile, ...]
    identities: tuple[Identity | None, ...]
    axes: Axes
    manner: Manner
    starts: tuple[int, ...]
    file: Int64[np.ndarray, "pieces"]
    place: Int64[np.ndarray, "pieces 2"]
    first_part: Int64[np.ndarray, "pieces_and_end"]
    part_rows: Int64[np.ndarray, "parts"]
    part_span: Int64[np.ndarray, "parts 2"]
    document: Int64[np.ndarray, "parts"]
    num_documents: int
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


def first_pass(
    files: Sequence[TraceFile],
    routers: Sequence[KnownRouter],
    where: str,
    company: Company = ALONE,
    copies: str = "",
) -> PlacedFiles:
    """What of ``files`` is a token, held against all routers of the checkpoint.

    Raises
    ------
    RecordingError
        When they do not fit, with the numbers; nothing is guessed.
    """
    found: list[FileFacts] = []
    survey, manner = Survey(), None
    if company.begun is not None:
        company.begun(sum(file.path.stat().st_size for file in files if isinstance(file, FileOf)))
    for number, file in enumerate(files):
        facts = _known(file, company, survey)
        if facts is None:
            facts = facts_of(file, routers, survey, where, company.refused)
            _keep(file, company, facts)
        manner = _same_manner(manner, facts.manner, files, number, where)
        survey = survey.and_of(facts.survey)
        found.append(facts)
        if company.advanced is not None:
            company.advanced(number + 1, len(files))
    if manner is None:
        raise RecordingError(f"{where}: no request of it holds choices.")
    # what earlier files were read by may be known of later ones alone
    surveys = Survey()
    for number, facts in enumerate(found):
        if survey.is_flat and facts.told != survey.told and facts.survey.num_requests:
            told = Survey(told=survey.told)
            found[number] = facts_of(files[number], routers, told, where, company.refused)
        surveys = surveys.and_of(found[number].survey)
    axes = axes_of(surveys, routers, manner.layers, where)
    for number, facts in enumerate(found):
        if facts.axes not in (None, (axes.shape, axes.columns)):
            found[number] = facts_of(files[number], routers, surveys, where, company.refused, axes)
            _keep(files[number], company, found[number])
        if (refusal := found[number].refusal) is not None:
            raise refusal
    return _put_together(files, found, axes, manner, where, copies)


def _known(file: TraceFile, company: Company, before: Survey) -> FileFacts | None:
    """Facts that were kept, if they were found with what is known of flat ids here."""
    if company.kept is None or not isinstance(file, FileOf):
        return None
    facts = company.kept.find(file.path)
    if facts is not None and facts.survey.is_flat and before.told not in (None, facts.told):
        return None
    return facts


def _keep(file: TraceFile, company: Company, facts: FileFacts) -> None:
    if company.kept is not None and isinstance(file, FileOf) and facts.refusal is None:
        company.kept.keep(file.path, facts)


def _same_manner(
    manner: Manner | None,
    found: Manner | None,
    files: Sequence[TraceFile],
    number: int,
    where: str,
) -> Manner | None:
    """That of all files so far; RecordingError where this one differs."""
    if manner is None or found is None or manner == found:
        return found if manner is None else manner
    one, other = files[0].label, files[number].label
    if manner.dialect != found.dialect:
        raise RecordingError(
            f"{where}: {one} is a trace of {manner.dialect}, {other} of {found.dialect}; "
            "expected one dialect.",
            "Give the files of each by themselves.",
        )
    raise RecordingError(
        f"{where}: files have different sets of layers: {listed(manner.layers)} "
        f"in {one}, {listed(found.layers)} in {other}.",
        "A line is missing (dropped or padded tokens are not traced), the run was cut off, or "
        "ranks are of different stages of a pipeline.",
    )


#: What is said about each kind of decision, with its count.
_SENTENCES: dict[str, str] = {
    "last": "requests whose last token was never routed: {n:,}",
    "masked": "rows cut by the file's own mask: {n:,}",
    "surplus": "padding rows cut behind the last routed token: {n:,}",
    "leading": "rows without choices cut at the beginning (prefix not captured): {n:,}",
    "trailing": "rows without choices cut at the end (padding): {n:,}",
    "inside": "rows without choices left out between others: {n:,}",
    "unrecorded": "rows left out with requests that hold no choice: {n:,}",
    "unrecorded requests": "requests that hold no choice: {n:,}",
    "told start": "leading positions omitted, as the file says: {n:,}",
    "cached": "leading positions omitted, as many as the engine had cached: {n:,}",
    "generation": "positions of prompts omitted, only generated tokens were recorded: {n:,}",
    "generation, and the last token of the prompt": (
        "positions of prompts omitted, recorded are the rows that generated a token: {n:,}"
    ),
    "stale": "rows equal to the row before them in every layer, in runs of 10 (stale?): {n:,}",
    "repeated": "requests left out because they stand there twice: {n:,}",
    "equal": "requests equal to another in every token and choice, kept: {n:,}",
}


def _put_together(
    files: Sequence[TraceFile],
    found: list[FileFacts],
    axes: Axes,
    manner: Manner,
    where: str,
    copies: str,
) -> PlacedFiles:
    """What follows of the facts of all files together."""
    notes, cut = Notes(), Counter[str]()
    num_copies = _without_copies(found) if copies else 0
    for facts in found:
        notes.add(facts.notes)
        cut += facts.cut
    if num_copies:
        notes.add([f"{copies}: {num_copies:,}"])
    rows = np.concatenate([facts.rows for facts in found])
    is_kept = _without_repetitions(found, rows, files, where, cut)
    document = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
    of_files = np.cumsum([0, *(len(facts.name) for facts in found)])
    parts = np.concatenate([f.part_request + n for f, n in zip(found, of_files[:-1], strict=True)])
    part_rows = np.concatenate([facts.part_rows for facts in found])
    of_pieces = np.cumsum([0, *np.concatenate([facts.piece_parts for facts in found])])
    sums = np.concatenate([[0], np.cumsum(np.where(is_kept[parts], part_rows, 0))])
    starts = tuple(sums[of_pieces].tolist())
    if not starts[-1]:
        raise RecordingError(f"{where}: no row of {len(rows)} requests holds choices.")
    positioned = np.concatenate([facts.is_positioned for facts in found])
    said = [
        f"Trace of {manner.dialect}"
        + (f" in {number_of(len(files), 'file')}" if len(files) > 1 else "")
    ]
    if any(facts.ids_are == "unknown" for facts in found):
        said.append("the file does not say whether ids are logical (without expert load balancing)")
    if manner.has_documents and not positioned[is_kept].all():
        said.append(
            "no token ids and no counts of tokens: positions, and rows missing at an end, are "
            "not known"
        )
    said += [*notes.texts, *axes.notes]
    said += [text.format(n=cut[kind]) for kind, text in _SENTENCES.items() if cut[kind]]
    return PlacedFiles(
        tuple(files),
        tuple(facts.identity for facts in found),
        axes,
        manner,
        starts,
        np.repeat(np.arange(len(found)), [len(facts.piece_parts) for facts in found]),
        np.concatenate([facts.place for facts in found]),
        of_pieces,
        part_rows,
        np.concatenate([facts.part_span for facts in found]),
        document[parts],
        int(is_kept.sum()),
        tuple(said),
    )


def _without_copies(found: list[FileFacts]) -> int:
    """Empties the facts of files that hold the choices of an earlier one; how many there are."""
    seen: set[bytes] = set()
    num_copies = 0
    for number, facts in enumerate(found):
        digest = facts.digest.tobytes()
        if digest in seen and len(facts.name):
            num_copies += 1
            none = np.zeros_like(facts.part_rows)
            found[number] = replace(facts, part_rows=none, cut=Counter())
        seen.add(digest)
    return num_copies


def _without_repetitions(
    found: Sequence[FileFacts],
    rows: Int64[np.ndarray, "requests"],
    files: Sequence[TraceFile],
    where: str,
    cut: Counter[str],
) -> Bool[np.ndarray, "requests"]:
    """Every request once; one name for two contents is refused.

    Two names for one content are kept, since equal prompts may be answered equally, and counted.
    """
    candidate = np.flatnonzero(rows)
    name = np.concatenate([facts.name for facts in found])[candidate]
    content = np.concatenate([facts.content for facts in found])[candidate]
    first = _first_equal(name)
    is_first = first == np.arange(len(candidate))
    differs = (content != content[first]).any(axis=1)
    if differs.any():
        at = int(candidate[np.argmax(differs)])
        said, one, other = _named(found, files, at, int(candidate[first[np.argmax(differs)]]))
        both = f"in it, in {one} and {other}" if one != other else "in it"
        raise RecordingError(
            f"{where}: request {said} stands twice {both}, with different choices.",
            "Are these files of two runs? Give them one by one.",
        )
    cut["repeated"] += int((~is_first).sum())
    kept = content[is_first]
    # a single token has nothing that could tell it from others
    again = _first_equal(kept) != np.arange(len(kept))
    cut["equal"] += int((again & (rows[candidate[is_first]] > 1)).sum())
    is_kept = np.zeros(len(rows), bool)
    is_kept[candidate[is_first]] = True
    return is_kept


def _first_equal(hashes: UInt64[np.ndarray, "some 2"]) -> Int64[np.ndarray, "some"]:
    """The first of those that each is equal to."""
    pairs = np.ascontiguousarray(hashes).view([("a", "u8"), ("b", "u8")])[:, 0]
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    return first[inverse.reshape(-1)]


def _named(
    found: Sequence[FileFacts], files: Sequence[TraceFile], at: int, first: int
) -> tuple[str, str, str]:
    """The name of a request, which is read again, and the files of it and of another."""
    ends = np.cumsum([len(facts.name) for facts in found])
    number, other = (int(np.searchsorted(ends, n, side="right")) for n in (at, first))
    within = at - int(ends[number] - len(found[number].name))
    requests: Iterator[RequestTrace] = (
        request
        for trace, _ in files[number].pieces(BEGINNING)
        for request in trace.requests
        if not request.first_row
    )
    name = next((r.name for n, r in enumerate(requests) if n == within), "")
    return name, files[other].label, files[number].label
