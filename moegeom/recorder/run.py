"""Recording a model of transformers on text files."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import CheckpointError, RecordingError, UsageError
from moegeom.core.files import open_regular, read_regular, refuse_existing
from moegeom.core.limits import TEXT_BYTES
from moegeom.core.router import RouterSet
from moegeom.core.text import quoted
from moegeom.pipeline import Watch
from moegeom.recorder.attention import AttentionRecorder, listened_layers
from moegeom.recorder.harm import make_flips
from moegeom.recorder.keep import Keep, parse_keep
from moegeom.recorder.recorder import RouterRecorder
from moegeom.recorder.request import CaptureRequest, TextFile
from moegeom.router.load import load_routers
from moegeom.router.requested_family import NOTHING_ASKED
from moegeom.tokens.recording.harm import write_harm

#: Tokens that a model reads at once, unless it can read fewer.
DEFAULT_LENGTH = 2048

#: What transformers raises where files are missing or make no sense to it.
_OF_TRANSFORMERS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True)
class AttentionPlan:
    """A capture of sums over heads of attention: of which layers, in the family's words."""

    checkpoint: str
    family: str
    layers: tuple[str, ...]
    num_tokens: int
    length: int


@dataclass(frozen=True)
class CapturePlan:
    """What a capture is going to do: said before the model is loaded."""

    routers: RouterSet
    keep: Keep
    num_tokens: int
    length: int
    bytes_per_token: int
    free_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token


@dataclass(frozen=True)
class Captured:
    """The recording, or with ``fold`` the results; ``num_resumed`` tokens were there before."""

    out: Path
    num_tokens: int
    num_resumed: int
    num_documents: int
    has_chosen: bool
    num_bytes: int
    num_flips: int = 0
    harm: float = 0.0
    reasons: Mapping[str, str] = field(default_factory=dict)


def plan_capture(request: CaptureRequest) -> CapturePlan | AttentionPlan:
    """What would be recorded, and how large it would be; reads the routers alone.

    Raises
    ------
    MoeGeomError
        When the checkpoint has no routers, a text cannot be read, or the disk is too small.
    """
    refuse_existing(request.out, hint="Choose another --out.")
    if request.dtype is not None and request.dtype not in _DTYPES:
        raise UsageError(f"--dtype {request.dtype}: expected one of {', '.join(_DTYPES)}.")
    if not request.texts:
        raise UsageError("no text to read.", "Name files with --text.")
    num_documents(request.texts)  # what cannot be read is said before a model is loaded
    store = open_checkpoint(request.model)
    if request.is_attention:
        return _attention_plan(request, store)
    routers = load_routers(store, requested_family=request.requested_family)
    keep = Keep("router_input") if request.fold else parse_keep(request.keep, routers.routers)
    if request.fold and request.keep not in (None, "hidden"):
        raise UsageError(f"--fold measures router inputs; --keep {request.keep} does not apply.")
    if request.fold and request.flips is not None:
        raise UsageError("--flips belongs to a recording; --fold makes none.", "Leave out --fold.")
    length = _length(request, store.config)
    size = _float_bytes(request, store.config)
    row = 0 if request.fold else sum(keep.bytes_per_token(r, size) for r in routers.routers)
    above = next(folder for folder in request.out.resolve().parents if folder.exists())
    free = shutil.disk_usage(above).free
    plan = CapturePlan(routers, keep, request.num_tokens, length, row, free)
    if plan.num_bytes > free:
        raise UsageError(
            f"{request.out}: {plan.num_bytes / 1e9:.3g} GB are to be written; the disk has "
            f"{free / 1e9:.3g} GB left.",
            "Fewer --num-tokens, --keep top-logits, or another --out.",
        )
    return plan


def _attention_plan(request: CaptureRequest, store: TensorStore) -> AttentionPlan:
    for option, is_set in (
        ("--fold", request.fold),
        ("--flips", request.flips is not None),
        ("--restart", request.restart),
        ("--family-file", request.requested_family != NOTHING_ASKED),
    ):
        if is_set:
            raise UsageError(f"{option} does not apply to --keep {request.keep}.")
    layers = listened_layers(store, request.attention_layers)
    length = _length(request, store.config)
    return AttentionPlan(
        store.label,
        layers[0].family.name,
        tuple(layer.name for layer in layers),
        request.num_tokens,
        length,
    )


def capture(
    request: CaptureRequest, plan: CapturePlan | AttentionPlan, watch: Watch | None = None
) -> Captured:
    """Runs the model over the texts, piece by piece; goes on where an equal run was cut off.

    Raises
    ------
    MoeGeomError
        When transformers cannot load the model, or the recording cannot be made.
    """
    tokenize = tokenizer_of(request.model, request.tokenizer)
    pieces: Iterable[TextPiece] = cut(
        read_documents(request.texts, tokenize),
        plan.length,
        request.num_tokens,
        num_documents(request.texts),
        request.tokens_per_document,
    )
    first = next(iter(pieces), None)
    if first is None:
        raise RecordingError("The texts hold no token.", "Name files with text in them: --text.")
    pieces = itertools.chain((first,), pieces)
    model = _load(request)
    engine = _engine(request, model)
    if isinstance(plan, AttentionPlan):
        return _captured_attention(request, model, pieces, engine, watch)
    domains: tuple[str, ...] = ()
    num_tokens = None
    if request.fold:  # the reductions are laid out by domain, and the sample by the total
        pieces = list(pieces)
        domains = tuple(dict.fromkeys(p.domain for p in pieces if p.domain is not None))
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
    recorder = RouterRecorder(
        model,
        request.out,
        keep=None if request.fold else request.keep,
        checkpoint=request.model,
        domains=domains,
        fold=request.fold,
        num_tokens=num_tokens,
        family=request.requested_family,
        engine=engine,
        journal=None if request.fold else _journal(request, plan, engine),
        restart=request.restart,
    )
    documents: set[int] = set()
    done, read = 0, []
    with recorder, _one_way(model):
        resumed = recorder.num_recorded
        for piece in _told(pieces, request.num_tokens, watch):
            documents.add(piece.document)
            if request.flips is not None:
                read.append((done, piece.token_ids))
            if done < resumed:
                recorder.skip(piece.domain)
            else:
                _run(model, piece, recorder)
            done += len(piece.token_ids)
    captured = Captured(request.out, done, resumed, len(documents), recorder.has_chosen, 0)
    if request.flips is not None:
        captured = _with_flips(captured, model, recorder, read, request.flips, watch)
    return replace(captured, num_bytes=_size(request.out))


def _with_flips(
    captured: Captured,
    model: torch.nn.Module,
    recorder: RouterRecorder,
    pieces: Sequence[tuple[int, Sequence[int]]],
    flips: int,
    watch: Watch | None,
) -> Captured:
    """The recording with what flips cost beside it."""
    if watch:
        watch.start(flips * len(recorder.places))
        watch.begin("flips")
    advanced = watch.advance if watch else None
    with _one_way(model):
        columns, reasons = make_flips(model, recorder.identity, pieces, flips, advanced)
    write_harm(captured.out, columns)
    harm = float(np.mean(columns["kl"]))
    return replace(captured, num_flips=len(columns["kl"]), harm=harm, reasons=reasons)


def _captured_attention(
    request: CaptureRequest,
    model: torch.nn.Module,
    pieces: Iterable[TextPiece],
    engine: str,
    watch: Watch | None,
) -> Captured:
    recorder = AttentionRecorder(
        model, request.out, checkpoint=request.model, layers=request.attention_layers, engine=engine
    )
    documents: set[int] = set()
    with recorder, _one_way(model):
        for piece in _told(pieces, request.num_tokens, watch):
            documents.add(piece.document)
            _run(model, piece, recorder)
    size = _size(request.out)
    return Captured(request.out, recorder.num_tokens, 0, len(documents), True, size)


def _told(pieces: Iterable[TextPiece], total: int, watch: Watch | None) -> Iterator[TextPiece]:
    """The pieces; ``watch`` is told when one is done with."""
    if watch:
        watch.start(total)
        watch.begin("tokens")
    for piece in pieces:
        yield piece
        if watch:
            watch.advance(len(piece.token_ids))


def _size(out: Path) -> int:
    return sum(file.stat().st_size for file in out.iterdir() if file.is_file())


def _journal(request: CaptureRequest, plan: CapturePlan, engine: str) -> dict[str, Any]:
    """What an interrupted capture must have in common with the one that goes on."""
    return {
        "checkpoint": plan.routers.fingerprint,
        "texts": files_digest(request.texts),
        "tokenizer": request.tokenizer or "",
        "keep": request.keep or "",
        "num_tokens": request.num_tokens,
        "tokens_per_document": request.tokens_per_document or 0,
        "length": plan.length,
        "engine": engine,
    }


def _run(
    model: torch.nn.Module, piece: TextPiece, recorder: RouterRecorder | AttentionRecorder
) -> None:
    ids = torch.tensor([piece.token_ids], device=next(model.parameters()).device)
    positions = torch.arange(ids.shape[1])[None] + piece.position
    recorder.tokens(ids, documents=[piece.document], positions=positions, domain=piece.domain)
    model(input_ids=ids, use_cache=False)


@contextmanager
def _one_way(model: torch.nn.Module) -> Iterator[None]:
    """No gradients, no dropout."""
    model.eval()
    with torch.no_grad():
        yield


def _load(request: CaptureRequest) -> torch.nn.Module:
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True}
    if request.dtype is not None:
        options["dtype"] = _DTYPES[request.dtype]
    if request.eager or request.is_attention:  # others give no attention weights back
        options["attn_implementation"] = "eager"
    if request.eager:
        options["experts_implementation"] = "eager"
    if request.device == "auto":
        options["device_map"] = "auto"
    try:
        config = transformers.AutoConfig.from_pretrained(request.model, local_files_only=True)
        named = (config.architectures or ["AutoModelForCausalLM"])[0]
        kind = getattr(transformers, named, transformers.AutoModelForCausalLM)
        model: Any = kind.from_pretrained(request.model, **options)
    except (*_OF_TRANSFORMERS, RuntimeError) as e:
        reason = " ".join(str(e).split())[:300]
        raise CheckpointError(
            f"{request.model}: transformers cannot load the model ({reason}).",
            "Models with code of their own are recorded from your own loop with RouterRecorder "
            "(docs/capture.md).",
        ) from None
    return model if request.device == "auto" else model.to(request.device)


def _engine(request: CaptureRequest, model: torch.nn.Module) -> str:
    from transformers import __version__

    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kernels = "eager" if request.eager else getattr(model.config, "_attn_implementation", "")
    return ", ".join(filter(None, (f"transformers {__version__}", dtype, kernels)))


def _length(request: CaptureRequest, config: Any) -> int:
    """Tokens that are read at once."""
    return request.length or min(DEFAULT_LENGTH, _longest(config) or DEFAULT_LENGTH)


def _longest(config: Any) -> int | None:
    """Tokens that the model can read at once, if its config says so."""
    for part in (config, config.get("text_config") or {}):
        longest = part.get("max_position_embeddings") if hasattr(part, "get") else None
        if isinstance(longest, int) and longest > 0:
            return longest
    return None


def _float_bytes(request: CaptureRequest, config: Any) -> int:
    """Bytes of one number of a router input."""
    name = request.dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return torch.empty(0, dtype=_DTYPES.get(str(name), torch.bfloat16)).element_size()


# -------------------------------------------------------------------------------------------- texts
Tokenize = Callable[[str], Sequence[int]]

_HINT = 'Each line is one document: {"text": "...", "domain": "..."}; or "token_ids" for "text".'


@dataclass(frozen=True)
class TextDocument:
    """One text as token ids."""

    token_ids: tuple[int, ...]
    domain: str | None


@dataclass(frozen=True)
class TextPiece:
    """Tokens of one document that the model reads at once; ``position`` is that of the first."""

    token_ids: tuple[int, ...]
    document: int
    position: int
    domain: str | None


def files_digest(files: Sequence[TextFile]) -> str:
    """Names domains and contents of all files; RecordingError when one cannot be read."""
    digests = []
    for file in files:
        try:
            digests.append((file.domain, digest_of_file(file.path)))
        except OSError as error:
            raise RecordingError(f"{file.path}: cannot be read ({error.strerror}).") from None
    return digest_of(digests)


def read_documents(files: Sequence[TextFile], tokenize: Tokenize) -> Iterator[TextDocument]:
    """Documents in order: lines of ``.jsonl`` files, each other file as one document.

    Raises
    ------
    RecordingError
        When a file cannot be read, is no UTF-8, or a line is no document.
    """
    for file in files:
        yield from (_lines if file.holds_many else _whole)(file, tokenize)


def num_documents(files: Sequence[TextFile]) -> int:
    """How many documents the files hold.

    Raises
    ------
    RecordingError
        When a file cannot be read, or holds nothing.
    """
    total = 0
    for file in files:
        try:
            if file.path.is_dir():
                raise RecordingError(
                    f"{file.path}: a folder; --text takes files.",
                    f"Name each of its files: --text {file.path / 'FILE.txt'} --text ...",
                )
            with open_regular(file.path, follows=True) as stream:
                lines = iter(lambda: stream.readline(TEXT_BYTES), b"")
                filled = sum(1 for line in lines if line.strip())
        except OSError as error:
            raise RecordingError(f"{file.path}: cannot be read ({error.strerror}).") from None
        if not filled:
            raise RecordingError(f"{file.path}: holds no text.", "Name a file with text in it.")
        total += filled if file.holds_many else 1
    return total


#: Tokens that a document gives at least, if it has them, however many documents there are.
_LEAST_SHARE = 256


def cut(
    documents: Iterator[TextDocument],
    length: int,
    num_tokens: int,
    num_documents: int = 1,
    per_document: int | None = None,
) -> Iterator[TextPiece]:
    """Pieces of at most ``length`` tokens, ``num_tokens`` tokens in all; empty documents count.

    Of each document its first ``per_document`` tokens; None spreads what is left over the documents
    that are left, at least 256 each: of more documents than that allows, the first.
    """
    left = num_tokens
    for number, document in enumerate(documents):
        if left <= 0:
            return
        even = -(-left // max(num_documents - number, 1))
        share = min(left, per_document or max(even, _LEAST_SHARE))
        token_ids = document.token_ids[:share]
        left -= len(token_ids)
        for position in range(0, len(token_ids), length):
            ids = token_ids[position : position + length]
            yield TextPiece(ids, number, position, document.domain)


def _whole(file: TextFile, tokenize: Tokenize) -> Iterator[TextDocument]:
    try:
        text = read_regular(file.path, TEXT_BYTES, follows=True).decode("utf-8")
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise RecordingError(
                f"{file.path.name} is larger than {TEXT_BYTES >> 20} MiB, and one document.",
                f"Cut it into documents, one per line of a .jsonl file. {_HINT}",
            ) from None
        raise RecordingError(f"{file.path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise RecordingError(
            f"{file.path.name} is no UTF-8 text (byte {error.start}).", "Convert it, or name text."
        ) from None
    yield TextDocument(tuple(tokenize(text)), file.domain)


def _lines(file: TextFile, tokenize: Tokenize) -> Iterator[TextDocument]:
    try:
        with open_regular(file.path, follows=True) as stream:
            number = 0
            while line := stream.readline(TEXT_BYTES):
                number += 1
                if line.strip():
                    yield _document(line, f"{file.path.name}, line {number}", file, tokenize)
    except OSError as error:
        raise RecordingError(f"{file.path}: cannot be read ({error.strerror}).") from None


def _document(line: bytes, where: str, file: TextFile, tokenize: Tokenize) -> TextDocument:
    try:
        record = parse_json(line, TEXT_BYTES)
    except DocumentError as error:
        raise RecordingError(f"{where}: {error}.", _HINT) from None
    if not isinstance(record, dict):
        raise RecordingError(f"{where}: {type(record).__name__}; expected an object.", _HINT)
    domain = record.get("domain", file.domain)
    if not isinstance(domain, str | None):
        raise RecordingError(f"{where}: domain {quoted(domain)}; expected a text.", _HINT)
    text, ids = record.get("text"), record.get("token_ids")
    if isinstance(text, str):
        return TextDocument(tuple(tokenize(text)), domain)
    if isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids):
        return TextDocument(tuple(ids), domain)
    names = ", ".join(list(record)[:8]) or "no keys"
    raise RecordingError(f"{where}: found {names}; expected text or token_ids.", _HINT)


#: Any of these makes a folder one with a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "tiktoken.model",
    "tekken.json",
)


def _no_tokenizer(folder: Path, reason: str) -> UsageError:
    return UsageError(
        f"{folder}: no tokenizer that transformers can load ({reason}).",
        "--tokenizer FOLDER names another; --tokenizer bytes makes a token of each byte.",
    )


def tokenizer_of(model: Path, name: str | None) -> Tokenize:
    """How the model's text becomes token ids, special tokens of the tokenizer included.

    ``name`` is a folder with another tokenizer, or ``bytes``: a token is a byte.

    Raises
    ------
    UsageError
        When there is no tokenizer.
    """
    if name == "bytes":
        return lambda text: list(text.encode("utf-8"))
    from transformers import AutoTokenizer

    folder = Path(name) if name else model
    # without its files transformers makes up an empty tokenizer, to which every text is nothing
    if not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise _no_tokenizer(folder, f"none of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _OF_TRANSFORMERS as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise _no_tokenizer(folder, reason) from None

    def tokenize(text: str) -> Sequence[int]:
        # the tokenizer warns about texts longer than the model reads at once: they are cut later
        return tokenizer(text, verbose=False)["input_ids"]

    return tokenize
