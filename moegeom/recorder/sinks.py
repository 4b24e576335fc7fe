"""Where captured tokens go: into a recording, or straight into the reductions of a scan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moegeom.core.errors import UsageError
from moegeom.core.text import number_of
from moegeom.recorder.fold import FoldSink
from moegeom.recorder.identity import Identity
from moegeom.recorder.keep import Keep
from moegeom.recorder.parts import merge_when_complete, part_path
from moegeom.recorder.ranks import Ranks
from moegeom.recorder.shard import Shard
from moegeom.recorder.taps import Place
from moegeom.tokens.recording.journal import recorded_tokens
from moegeom.tokens.recording.writer import RecordingWriter


class Sink(Protocol):
    """Takes shards."""

    def append(self, shard: Shard) -> None: ...


@dataclass(frozen=True)
class SinkFacts:
    """What was asked for; see ``RouterRecorder``."""

    out: Path
    fold: bool
    num_tokens: int | None
    domains: tuple[str, ...]
    engine: str
    journal: Mapping[str, Any] | None
    restart: bool
    ranks: Ranks


def refuse_unfoldable(facts: SinkFacts, keep: Keep) -> None:
    """Raises UsageError when folding is asked for and cannot be done.

    It needs router inputs, and several ranks something that connects them.
    """
    if not facts.fold:
        return
    if facts.ranks.num_ranks > 1 and facts.ranks.group is None:
        raise UsageError(
            f"fold=True on {number_of(facts.ranks.num_ranks, 'rank')} that nothing connects.",
            "Ranks fold together over torch.distributed: leave rank and num_ranks out, and name "
            "the group of those that run different tokens where it is not all of them.",
        )
    if keep.stage != "router_input" or keep.outputs:
        what = "outputs of experts" if keep.outputs else keep.stage
        raise UsageError(f"fold=True measures router inputs; it keeps no {what}.")


def open_sink(
    facts: SinkFacts,
    identity: Identity,
    places: Sequence[Place],
    keep: Keep,
    has_chosen: bool,
) -> AbstractContextManager[Sink]:
    """The sink that was asked for; what it makes is in place when it is left without error."""
    if not facts.fold:
        return _recording(facts, identity, places, keep)
    return FoldSink(
        facts.out,
        identity,
        places,
        facts.num_tokens,
        facts.domains,
        facts.engine,
        has_chosen,
        facts.ranks,
    )


class _RecordingSink:
    def __init__(self, writer: RecordingWriter) -> None:
        self._writer = writer

    def append(self, shard: Shard) -> None:
        for name in shard.domains:
            self._writer.add_domain(name)
        self._writer.append(shard.columns, shard.values, shard.chosen, outputs=shard.outputs)


def num_recorded(facts: SinkFacts) -> int:
    """Tokens that an interrupted recording of the same plan holds."""
    if facts.journal is None or facts.fold or facts.restart:
        return 0
    return recorded_tokens(_part(facts), facts.journal)


def _part(facts: SinkFacts) -> Path:
    return part_path(facts.out, facts.ranks.rank, facts.ranks.num_ranks)


@contextmanager
def _recording(
    facts: SinkFacts, identity: Identity, places: Sequence[Place], keep: Keep
) -> Iterator[Sink]:
    with RecordingWriter(
        _part(facts),
        keep.stage,
        tuple(place.router.name for place in places),
        checkpoint_name=identity.checkpoint_name,
        fingerprint=identity.fingerprint,
        engine=facts.engine,
        journal=facts.journal,
        restart=facts.restart,
    ) as writer:
        yield _RecordingSink(writer)
    merge_when_complete(facts.out, facts.ranks.num_ranks)
