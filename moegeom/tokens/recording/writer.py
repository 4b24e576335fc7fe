"""Writing a recording, shard by shard; it has its name only when it is complete."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.core.errors import RecordingError, first_line
from moegeom.core.files import write_whole, writing
from moegeom.core.shapes import Shaped
from moegeom.core.tokens import OutputKind, Stage, TokenColumns, TopLogits
from moegeom.tokens.recording.columns import ROW_GROUP_TOKENS, ParquetColumns, write_columns
from moegeom.tokens.recording.facts import (
    FACTS_FILE,
    SCHEMA,
    RecordedCheckpoint,
    RecordingFacts,
    RecordingShard,
    check_domains,
    check_facts,
    check_routers,
    columns_file_name,
    render_facts,
    tensor_file_name,
)
from moegeom.tokens.recording.journal import (
    BEGIN_AGAIN,
    ByRouter,
    Draft,
    Journal,
    Noted,
    ShapeBook,
    check_columns,
    output_kinds,
    partial_path,
    shard_tensors,
)

# Underscores: routers may differ in width, and ShapeBook says what is wrong in our own words.
Values = Mapping[str, Shaped[np.ndarray, "_tokens _width"]] | Mapping[str, TopLogits]
Chosen = Mapping[str, Shaped[np.ndarray, "_tokens _top_k"]]
Outputs = Mapping[str, Mapping[str, Shaped[np.ndarray, "_tokens ..."]]]


class RecordingWriter:
    """A recording under construction, in ``<path>.partial`` until the ``with`` block ends well.

    Parameters
    ----------
    path
        Where the recording will be; must not exist.
    stage, routers
        What is recorded, and for which routers, in the order in which they will be listed.
    dtype
        float16, bfloat16, float32 or float64 to store values and outputs as; None takes the
        dtype of the first values. Not used for stage ``ids`` without outputs.
    domains
        The names that ``TokenColumns.domain`` numbers; ``add_domain`` adds to them.
    journal
        What is being recorded: texts, finite numbers, lists and mappings, as JSON has them.
    restart
        Discard what an interrupted writer with a journal left; without a journal no difference.

    Notes
    -----
    Equal input gives equal bytes. Each ``append`` is one shard: one file per router and tensor,
    so a shard should hold thousands of tokens. An exception inside the block removes what was
    written; a killed process leaves ``<path>.partial``, which no reader opens.

    With a journal every complete shard stays in ``<path>.partial``, whatever ends the block or the
    process. A writer of the same path with equal arguments goes on after the last of them:
    ``num_tokens`` and ``num_shards`` say at the beginning of the block where that is. The caller
    appends what follows, and the recording is the one of an uninterrupted writer, byte for byte.
    """

    def __init__(
        self,
        path: str | Path,
        stage: Stage,
        routers: tuple[str, ...],
        *,
        checkpoint_name: str = "",
        fingerprint: str = "",
        engine: str = "",
        domains: tuple[str, ...] = (),
        dtype: str | None = None,
        created_by: str = "moegeom",
        journal: Mapping[str, Any] | None = None,
        restart: bool = False,
    ) -> None:
        self._path = Path(path).resolve()
        self._stage: Stage = stage
        self._routers = tuple(routers)
        self._domains = tuple(domains)
        self._num_noted_domains = len(self._domains)
        self._texts = {
            "checkpoint_name": checkpoint_name,
            "fingerprint": fingerprint,
            "engine": engine,
            "created_by": created_by,
        }
        self._book = ShapeBook.of(stage, self._routers, dtype)
        self._draft = Draft(self._path, self._journal(journal), restart)
        self._is_open = False
        self._shards: list[RecordingShard] = []
        self._documents: set[int] = set()
        self._has_documents = True
        check_routers(self._routers, self._path.name)
        check_domains(self._domains, self._path.name)

    def _journal(self, journal: Mapping[str, Any] | None) -> Journal | None:
        if journal is None:
            return None
        plan = {
            "schema": SCHEMA,
            "stage": self._stage,
            "routers": list(self._routers),
            "dtype": self._book.dtype,
            "domains": list(self._domains),
            **self._texts,
            "journal": dict(journal),
        }
        return Journal(partial_path(self._path), plan, self._book)

    def __enter__(self) -> RecordingWriter:
        """Begins the recording, or goes on with an interrupted one.

        Raises
        ------
        UsageError
            When the recording exists, another process is writing it, or the interrupted one is of
            other arguments.
        RecordingError
            When the interrupted one is damaged.
        """
        if self._is_open or self._shards:
            raise RecordingError(f"{self._path.name}: a writer is entered once; make another.")
        noted = self._draft.begin()
        try:
            self._go_on(noted)
        except BaseException:
            self._draft.leave()
            raise
        self._is_open = True
        return self

    def _go_on(self, noted: Sequence[Noted]) -> None:
        for shard in noted:
            self._domains += shard.domains
            self._shards.append(RecordingShard(self.num_tokens, shard.num_tokens))
            self._book = shard.book
        self._num_noted_domains = len(self._domains)
        try:
            check_domains(self._domains, self._path.name)
            self._read_documents()
        except RecordingError as error:
            raise RecordingError(error.message, BEGIN_AGAIN) from None

    def _read_documents(self) -> None:
        files = tuple(self._draft.files / columns_file_name(n) for n in range(self.num_shards))
        sizes = tuple(shard.num_tokens for shard in self._shards)
        columns = ParquetColumns(files, sizes, self._domains)
        for start in range(0, self.num_tokens, ROW_GROUP_TOKENS):
            stop = min(start + ROW_GROUP_TOKENS, self.num_tokens)
            self._note_documents(columns.read(start, stop))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._is_open = False
        try:
            if kind is None:
                self._finish()
        finally:
            self._draft.leave()

    @property
    def num_tokens(self) -> int:
        """Tokens in the shards so far."""
        return sum(shard.num_tokens for shard in self._shards)

    @property
    def num_shards(self) -> int:
        """Shards so far."""
        return len(self._shards)

    def add_domain(self, name: str) -> int:
        """The number of a domain in ``TokenColumns.domain``; the next one when it has none yet.

        A writer that goes on knows the domains of the shards it goes on from; those that were
        added after the last of them are to be added again.

        Raises
        ------
        RecordingError
            When there are too many domains.
        """
        if name not in self._domains:
            check_domains((*self._domains, name), self._path.name)
            self._domains = (*self._domains, name)
        return self._domains.index(name)

    def append(
        self,
        columns: TokenColumns,
        values: Values | None = None,
        chosen: Chosen | None = None,
        *,
        outputs: Outputs | None = None,
    ) -> None:
        """Add one shard.

        Parameters
        ----------
        columns
            One entry per token; the number of tokens of the shard.
        values
            For every router, (tokens, width) floats, or ``TopLogits`` at stage ``top_logits``;
            None at stage ``ids``.
        chosen
            For every router, (tokens, top_k) integers in the engine's order; in all shards or in
            none. At stage ``ids`` this is the recording.
        outputs
            By kind, one or more of ``OUTPUT_KINDS``, and then for every router: floats of shape
            (tokens, width) for ``shared_output`` and ``routed_output``, (tokens, experts, width)
            for ``expert_output``. The same kinds in all shards.

        Raises
        ------
        RecordingError
            When a router is missing or extra, or a shape or dtype differs from the shards before.
        UsageError
            When there is no such kind of output, or values do not fit the dtype to store them as.
        """
        tensors = shard_tensors(self._stage, values, chosen, outputs)
        self.append_tensors(columns, tensors, output_kinds(outputs))

    def append_tensors(
        self, columns: TokenColumns, tensors: ByRouter, outputs: tuple[OutputKind, ...] = ()
    ) -> None:
        """Add one shard of tensors by router and by the name that they have in the files.

        What ``append`` does in the end: for rows that come from files. ``outputs`` are the kinds
        among the tensors, in the order of ``OUTPUT_KINDS``.

        Raises
        ------
        RecordingError, UsageError
            As ``append`` does.
        """
        if not self._is_open:
            raise RecordingError(f"{self._path.name}: append() outside the writer's with block.")
        shard = len(self._shards)
        where = f"{self._path.name}: shard {shard}"
        num_tokens = check_columns(columns, len(self._domains), where)
        book = self._book.draft()
        ready = book.accept(tensors, outputs, num_tokens, where)
        self._book = book
        with writing(self._path):
            file = self._draft.files / columns_file_name(shard)
            write_columns(file, self.num_tokens, columns, self._domains)
            for router, arrays in ready.items():
                self._write_router(router, shard, arrays)
            self._draft.note(num_tokens, self._domains[self._num_noted_domains :], self._book)
        self._num_noted_domains = len(self._domains)
        self._note_documents(columns)
        self._shards.append(RecordingShard(self.num_tokens, num_tokens))

    def _write_router(self, router: str, shard: int, arrays: dict[str, np.ndarray]) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        files: dict[str, dict[str, np.ndarray]] = {}
        for tensor in self._book.tensors:
            files.setdefault(tensor.file_prefix, {})[tensor.name] = arrays[tensor.name]
        for prefix, content in files.items():
            path = self._draft.files / tensor_file_name(prefix, router, shard)
            try:
                save_file(content, path)
            except SafetensorError as error:  # what the system said stands in its text
                raise OSError(errno.EIO, first_line(error), str(path)) from error

    def _note_documents(self, columns: TokenColumns) -> None:
        documents = np.unique(columns.document)
        self._has_documents &= bool(documents[0] >= 0)
        self._documents.update(documents.tolist())

    def _finish(self) -> None:
        facts = RecordingFacts(
            stage=self._stage,
            dtype=self._book.stored_dtype,
            num_tokens=self.num_tokens,
            shards=tuple(self._shards),
            routers=self._routers,
            has_chosen=self._book.has_chosen,
            has_documents=self._has_documents,
            domains=self._domains,
            num_documents=len(self._documents) if self._has_documents else None,
            checkpoint=RecordedCheckpoint(
                self._texts["checkpoint_name"], self._texts["fingerprint"]
            ),
            engine=self._texts["engine"],
            created_by=self._texts["created_by"],
            outputs=self._book.outputs,
        )
        if not self._shards:
            raise RecordingError(f"{self._path.name}: nothing was appended.")
        check_facts(facts, self._path.name)
        # The facts come last and the rename after them: a reader sees all or nothing.
        write_whole(self._draft.files / FACTS_FILE, render_facts(facts))
        self._draft.publish()
