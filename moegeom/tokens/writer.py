"""Writing a recording, shard by shard; it has its name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.tokens import Stage, TokenColumns, TopLogits
from moegeom.tokens.columns import read_column, write_columns
from moegeom.tokens.journal import JOURNAL_FILE, Journal
from moegeom.tokens.recording import (
    FACTS_FILE,
    RecordingFacts,
    Shard,
    check_domains,
    check_facts,
    check_routers,
    columns_file_name,
    render_facts,
    tensor_file_name,
)
from moegeom.tokens.shard_arrays import ShapeBook, check_columns, output_kinds, shard_tensors

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
        The names that ``TokenColumns.domain`` numbers.

    Notes
    -----
    Equal input gives equal bytes. Each ``append`` is one shard: one file per router and tensor,
    so a shard should hold thousands of tokens. An exception inside the block removes what was
    written; a killed process leaves ``<path>.partial``, which no reader opens.

    With a journal (what is being recorded, as JSON) the partial recording stays, whatever ends the
    block or the process, and a writer with an equal journal goes on behind the last complete
    shard: ``num_tokens`` says in the block where that is. ``restart`` discards it instead.
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
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._stage: Stage = stage
        self._routers = tuple(routers)
        self._domains = tuple(domains)
        self._texts = {
            "checkpoint_name": checkpoint_name,
            "fingerprint": fingerprint,
            "engine": engine,
            "created_by": created_by,
        }
        self._book = ShapeBook(stage, self._routers, dtype)
        self._journal: Journal | None = None
        if journal is not None:
            fixed = {"stage": stage, "routers": list(routers), "dtype": dtype, **self._texts}
            self._journal = Journal(self._partial, {**fixed, **journal})
        self._restart = restart
        self._shards: list[Shard] = []
        self._documents: set[int] = set()
        self._has_documents = True
        check_routers(self._routers, self._path.name)
        check_domains(self._domains, self._path.name)

    def __enter__(self) -> RecordingWriter:
        if self._path.exists():
            raise UsageError(f"{self._path.name} exists already.", "Choose another output.")
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._partial.mkdir(exist_ok=self._journal is not None)
        except FileExistsError:
            raise UsageError(
                f"{self._partial.name} exists: another recording is being written or was cut off.",
                "When nothing writes to it, delete it.",
            ) from None
        if self._journal is not None:
            self._go_on(self._journal.open(self._restart))
        return self

    def _go_on(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the shards of an interrupted run; files of an unfinished one are removed."""
        for number, entry in enumerate(entries):
            self._shards.append(Shard(self.num_tokens, entry["num_tokens"]))
            self._note_documents(read_column(self._partial / columns_file_name(number), "document"))
        if entries:
            self._domains = tuple(entries[-1]["domains"])
            self._book = self._book.restored(entries[-1]["book"])
        kept = {JOURNAL_FILE, *(name for n in range(len(entries)) for name in self._files(n))}
        for path in self._partial.iterdir():
            if path.name not in kept:
                path.unlink()

    def _files(self, shard: int) -> Iterator[str]:
        """Names of the files of a shard."""
        yield columns_file_name(shard)
        for prefix in dict.fromkeys(tensor.file_prefix for tensor in self._book.tensors):
            yield from (tensor_file_name(prefix, router, shard) for router in self._routers)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
                (self._path / JOURNAL_FILE).unlink(missing_ok=True)
        finally:
            if self._journal is None:
                shutil.rmtree(self._partial, ignore_errors=True)
            else:
                self._journal.close()
                self._leave_nothing_empty()

    def _leave_nothing_empty(self) -> None:
        """A run that failed before its first shard leaves nothing to go on from."""
        if not self._shards:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add_domain(self, name: str) -> int:
        """The number of a domain, which is added if it has none yet."""
        if name not in self._domains:
            check_domains((*self._domains, name), self._path.name)
            self._domains = (*self._domains, name)
        return self._domains.index(name)

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return sum(shard.num_tokens for shard in self._shards)

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
        if not self._partial.is_dir():
            raise RecordingError(f"{self._path.name}: append() outside the writer's with block.")
        shard = len(self._shards)
        where = f"{self._path.name}: shard {shard}"
        num_tokens = check_columns(columns, len(self._domains), where)
        kinds = output_kinds(outputs)
        tensors = shard_tensors(self._stage, values, chosen, outputs)
        book = self._book.draft()
        ready = book.accept(tensors, kinds, num_tokens, where)
        self._book = book
        write_columns(
            self._partial / columns_file_name(shard), self.num_tokens, columns, self._domains
        )
        for router, arrays in ready.items():
            self._write_router(router, shard, arrays)
        self._note_documents(columns.document)
        self._shards.append(Shard(self.num_tokens, num_tokens))
        if self._journal is not None:
            for name in self._files(shard):
                _sync(self._partial / name)
            self._journal.add(
                {
                    "num_tokens": num_tokens,
                    "domains": list(self._domains),
                    "book": self._book.as_json(),
                }
            )

    def _write_router(self, router: str, shard: int, arrays: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save_file

        files: dict[str, dict[str, np.ndarray]] = {}
        for tensor in self._book.tensors:
            files.setdefault(tensor.file_prefix, {})[tensor.name] = arrays[tensor.name]
        for prefix, content in files.items():
            save_file(content, self._partial / tensor_file_name(prefix, router, shard))

    def _note_documents(self, document: Int64[np.ndarray, "tokens"]) -> None:
        found = np.unique(document)
        self._has_documents &= bool(found[0] >= 0)
        self._documents.update(found.tolist())

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
            outputs=self._book.outputs,
            **self._texts,
        )
        if not self._shards:
            raise RecordingError(f"{self._path.name}: nothing was appended.")
        check_facts(facts, self._path.name)
        # The facts come last and the rename after them: a reader sees all or nothing.
        with (self._partial / FACTS_FILE).open("w", encoding="utf-8", newline="\n") as file:
            file.write(render_facts(facts))
            file.flush()
            os.fsync(file.fileno())
        if self._path.exists():
            raise UsageError(f"{self._path.name} came into being meanwhile.")
        self._partial.rename(self._path)


def _sync(path: Path) -> None:
    """Waits until a file is on the disk: the journal must not know more than there is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
