"""Documents from text files, as token ids, cut into pieces that a model reads at once."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moegeom.core.digest import digest_of, digest_of_file
from moegeom.core.documents import DocumentError, parse_json
from moegeom.core.errors import RecordingError, UsageError
from moegeom.core.files import open_regular, read_regular
from moegeom.core.limits import TEXT_BYTES
from moegeom.core.text import quoted

Tokenize = Callable[[str], Sequence[int]]

_HINT = 'Each line is one document: {"text": "...", "domain": "..."}; or "token_ids" for "text".'


@dataclass(frozen=True)
class TextFile:
    """A file of documents; ``domain`` is that of documents that do not name their own."""

    path: Path
    domain: str | None = None

    @property
    def holds_many(self) -> bool:
        """Whether each line is a document; else the whole file is one."""
        return self.path.suffix.lower() in (".jsonl", ".ndjson")


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


def parse_text_file(text: str) -> TextFile:
    """``FILE`` or ``DOMAIN=FILE``; a file that exists by the whole name is one without domain."""
    domain, sign, path = text.partition("=")
    if not sign or Path(text).exists():
        return TextFile(Path(text))
    return TextFile(Path(path), domain)


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


def cut(documents: Iterator[TextDocument], length: int, num_tokens: int) -> Iterator[TextPiece]:
    """Pieces of at most ``length`` tokens, ``num_tokens`` tokens in all; empty documents count."""
    left = num_tokens
    for number, document in enumerate(documents):
        for position in range(0, len(document.token_ids), length):
            if left <= 0:
                return
            ids = document.token_ids[position : position + min(length, left)]
            left -= len(ids)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise _no_tokenizer(folder, reason) from None

    def tokenize(text: str) -> Sequence[int]:
        # the tokenizer warns about texts longer than the model reads at once: they are cut later
        return tokenizer(text, verbose=False)["input_ids"]

    return tokenize
