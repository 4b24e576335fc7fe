"""The recording format: what ``recording.json`` says, and how the files beside it are named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from moegeom.core.documents import parse_json, record_of, refused_as
from moegeom.core.errors import RecordingError
from moegeom.core.files import read_regular
from moegeom.core.limits import DOMAINS, MOST_JSON
from moegeom.core.row_keys import slug
from moegeom.core.text import number_of, quoted
from moegeom.core.tokens import OutputKind, Stage
from moegeom.tokens.attention_record import is_attention_record
from moegeom.tokens.stages import FLOAT_DTYPES, has_floats

SCHEMA = 1
FACTS_FILE = "recording.json"

_ROUTER = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class RecordingShard(Struct, frozen=True):
    """Tokens ``[first_token, first_token + num_tokens)`` lie in one set of files."""

    first_token: Count
    num_tokens: Count


class RecordedCheckpoint(Struct, frozen=True):
    """The checkpoint that read the tokens."""

    name: str
    fingerprint: str


class RecordingFacts(Struct, frozen=True, omit_defaults=True):
    """The content of ``recording.json``. ``dtype`` is None for stage ``ids`` without outputs.

    Without outputs the file is the one that versions before them wrote.
    """

    stage: Stage
    dtype: str | None
    num_tokens: Count
    shards: tuple[RecordingShard, ...]
    routers: tuple[str, ...]
    has_chosen: bool
    has_documents: bool
    domains: tuple[str, ...]
    num_documents: Count | None
    checkpoint: RecordedCheckpoint
    engine: str
    created_by: str
    outputs: tuple[OutputKind, ...] = ()


class _Version(Struct):
    schema: int


def tensor_file_name(prefix: str, router: str, shard: int) -> str:
    """For example ``router_input-text.0-00000.safetensors``."""
    return f"{prefix}-{slug(router)}-{shard:05d}.safetensors"


def columns_file_name(shard: int) -> str:
    """For example ``tokens-00000.parquet``."""
    return f"tokens-{shard:05d}.parquet"


def render_facts(facts: RecordingFacts) -> str:
    """The text of ``recording.json``; equal facts give equal bytes."""
    document = {"schema": SCHEMA, **to_builtins(facts)}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read_facts(directory: Path) -> RecordingFacts:
    """What the recording says about itself, checked."""
    path = directory / FACTS_FILE
    where = f"{directory.name}/{FACTS_FILE}"
    try:
        raw = read_regular(path, MOST_JSON, follows=True)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_facts(directory) from None
    except OSError as error:
        raise RecordingError(f"{where}: cannot be read ({error.strerror}).") from None
    return parse_facts(raw, where)


def _no_facts(directory: Path) -> RecordingError:
    partial = directory.with_name(f"{directory.name}.partial")
    if is_attention_record(directory):
        hint = "It holds sums of attention: moegeom research attention CKPT --tokens ..."
    elif directory.name.endswith(".partial") or (partial.exists() and not directory.exists()):
        hint = "It was never finished: record it again."
    else:
        hint = "A foreign file (npy, npz, safetensors, parquet) is opened with --stage."
    return RecordingError(f"{directory.name} has no {FACTS_FILE}: no complete recording.", hint)


def parse_facts(raw: bytes, where: str) -> RecordingFacts:
    """``recording.json`` from bytes that anyone may have written."""
    with refused_as(RecordingError, where):
        document = parse_json(raw)
        schema = record_of(_Version, document).schema
        if schema != SCHEMA:
            raise RecordingError(
                f"{where}: schema {schema}; this moegeom reads schema {SCHEMA}.", "Update moegeom."
            )
        facts = record_of(RecordingFacts, document)
    check_facts(facts, where)
    return facts


def check_facts(facts: RecordingFacts, where: str) -> None:
    """Raise unless the facts fit together."""
    expected = 0
    for number, shard in enumerate(facts.shards):
        if shard.first_token != expected or shard.num_tokens < 1:
            raise RecordingError(
                f"{where}: shard {number} holds tokens from {shard.first_token} "
                f"({shard.num_tokens} of them); expected one or more tokens from {expected}."
            )
        expected += shard.num_tokens
    if expected != facts.num_tokens or not facts.shards:
        raise RecordingError(
            f"{where}: the shards hold {number_of(expected, 'token')}; num_tokens says "
            f"{facts.num_tokens}."
        )
    check_words(facts.dtype, facts.outputs, where)
    if (facts.dtype is None) == has_floats(facts.stage, facts.outputs):
        raise RecordingError(
            f"{where}: dtype is {facts.dtype} at stage {facts.stage} with "
            f"{len(facts.outputs)} kinds of outputs; "
            "expected null for ids without outputs and a float dtype for all others."
        )
    check_routers(facts.routers, where)
    check_domains(facts.domains, where)


def check_words(dtype: str | None, outputs: Sequence[str], where: str) -> None:
    """Raise unless the dtype is one of floats, or none, and no kind of outputs is named twice."""
    if dtype not in (None, *FLOAT_DTYPES):
        names = ", ".join(FLOAT_DTYPES)
        raise RecordingError(f"{where}: dtype is {quoted(dtype)}, expected null or one of {names}.")
    if len(set(outputs)) < len(outputs):
        raise RecordingError(f"{where}: outputs names a kind twice.")


def check_routers(routers: tuple[str, ...], where: str) -> None:
    """Raise unless every router has a name, and a file name, of its own."""
    if not routers:
        raise RecordingError(f"{where}: no routers; expected one or more.")
    slugs: dict[str, str] = {}
    for router in routers:
        # Names become file names: nothing that could leave the directory gets through.
        if not _ROUTER.fullmatch(router):
            raise RecordingError(
                f"{where}: router name {quoted(router)}; expected words of letters, digits, '_', "
                "'.' and '-' joined by '/', such as text/0."
            )
        other = slugs.setdefault(slug(router), router)
        if other is not router:
            raise RecordingError(
                f"{where}: routers {quoted(other)} and {quoted(router)} would share their files; "
                "expected names that differ in more than '/' and '.'."
            )


def check_domains(domains: tuple[str, ...], where: str) -> None:
    """Raise unless the domains are distinct and few enough to be numbered."""
    if len(set(domains)) != len(domains) or len(domains) > DOMAINS:
        raise RecordingError(
            f"{where}: {len(domains)} domains, {len(set(domains))} of them distinct; "
            f"expected distinct names, at most {DOMAINS}."
        )
