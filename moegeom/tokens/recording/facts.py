"""The recording format: what ``recording.json`` says, and how the files beside it are named."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError
from moegeom.core.files import read_regular
from moegeom.core.limits import DOMAINS, MOST_JSON
from moegeom.core.text import number_of, quoted
from moegeom.core.tokens import OUTPUT_KINDS, Stage
from moegeom.tokens.attention_record import is_attention_record
from moegeom.tokens.recording.fields import Fields
from moegeom.tokens.stages import FLOAT_DTYPES, has_floats

SCHEMA = 1
FACTS_FILE = "recording.json"

_ROUTER = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


@dataclass(frozen=True)
class RecordingShard:
    """Tokens ``[first_token, first_token + num_tokens)`` lie in one set of files."""

    first_token: int
    num_tokens: int


@dataclass(frozen=True)
class RecordingFacts:
    """The content of ``recording.json``. ``dtype`` is None for stage ``ids`` without outputs."""

    stage: Stage
    dtype: str | None
    num_tokens: int
    shards: tuple[RecordingShard, ...]
    routers: tuple[str, ...]
    has_chosen: bool
    has_documents: bool
    domains: tuple[str, ...]
    num_documents: int | None
    checkpoint_name: str
    fingerprint: str
    engine: str
    created_by: str
    outputs: tuple[str, ...] = ()


def router_slug(router: str) -> str:
    """The router's name in file names: ``text/0`` is ``text.0``."""
    return router.replace("/", ".")


def tensor_file_name(prefix: str, router: str, shard: int) -> str:
    """For example ``router_input-text.0-00000.safetensors``."""
    return f"{prefix}-{router_slug(router)}-{shard:05d}.safetensors"


def columns_file_name(shard: int) -> str:
    """For example ``tokens-00000.parquet``."""
    return f"tokens-{shard:05d}.parquet"


def render_facts(facts: RecordingFacts) -> str:
    """The text of ``recording.json``; equal facts give equal bytes."""
    document = {
        "schema": SCHEMA,
        "stage": facts.stage,
        "dtype": facts.dtype,
        "num_tokens": facts.num_tokens,
        "shards": [vars(shard) for shard in facts.shards],
        "routers": list(facts.routers),
        "has_chosen": facts.has_chosen,
        "has_documents": facts.has_documents,
        "domains": list(facts.domains),
        "num_documents": facts.num_documents,
        "checkpoint": {"name": facts.checkpoint_name, "fingerprint": facts.fingerprint},
        "engine": facts.engine,
        "created_by": facts.created_by,
    }
    # Without outputs the file is the one that versions before them wrote.
    if facts.outputs:
        document["outputs"] = list(facts.outputs)
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
        hint = "It holds sums of attention: moegeom attention CKPT --tokens ..."
    elif directory.name.endswith(".partial") or (partial.exists() and not directory.exists()):
        hint = "It was never finished: record it again."
    else:
        hint = "A foreign file (npy, npz, safetensors, parquet) is opened with --stage."
    return RecordingError(f"{directory.name} has no {FACTS_FILE}: no complete recording.", hint)


def parse_facts(raw: bytes, where: str) -> RecordingFacts:
    """``recording.json`` from bytes that anyone may have written."""
    try:
        document = parse_json(raw)
    except DocumentError as error:
        raise RecordingError(f"{where}: {error}.") from None
    fields = Fields(document, where)
    schema = fields.number("schema")
    if schema != SCHEMA:
        raise RecordingError(
            f"{where}: schema {schema}; this moegeom reads schema {SCHEMA}.", "Update moegeom."
        )
    checkpoint = Fields(fields.any("checkpoint"), f"{where}: checkpoint")
    shards = [Fields(shard, f"{where}: shard") for shard in fields.list("shards")]
    facts = RecordingFacts(
        stage=fields.one_of("stage", get_args(Stage)),
        dtype=fields.one_of("dtype", (None, *FLOAT_DTYPES)),
        num_tokens=fields.number("num_tokens"),
        shards=tuple(
            RecordingShard(s.number("first_token"), s.number("num_tokens")) for s in shards
        ),
        routers=fields.texts("routers"),
        has_chosen=fields.flag("has_chosen"),
        has_documents=fields.flag("has_documents"),
        domains=fields.texts("domains"),
        num_documents=fields.number_or_none("num_documents"),
        checkpoint_name=checkpoint.text("name"),
        fingerprint=checkpoint.text("fingerprint"),
        engine=fields.text("engine"),
        created_by=fields.text("created_by"),
        outputs=fields.some_of("outputs", OUTPUT_KINDS),
    )
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
    if (facts.dtype is None) == has_floats(facts.stage, facts.outputs):
        raise RecordingError(
            f"{where}: dtype is {facts.dtype} at stage {facts.stage} with "
            f"{len(facts.outputs)} kinds of outputs; "
            "expected null for ids without outputs and a float dtype for all others."
        )
    check_routers(facts.routers, where)
    check_domains(facts.domains, where)


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
        other = slugs.setdefault(router_slug(router), router)
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
