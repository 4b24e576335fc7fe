"""Text that every machine with Python has, in four domains of different character.

The sample models read bytes, so a document is a byte string and a token is a byte. Nothing here
is stored in the repository: the text is read from the Python installation, and only its sizes
and SHA-256 are written down (`corpus.json`).

Documents are split into training text and held-out documents. The split is by the hash of the
document, so that it does not depend on file order, and an excerpt of a held-out document is used
only if it does not occur anywhere in the training text: licences and character tables repeat each
other, and a model should not be measured on what it has read.
"""

import hashlib
import platform
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOMAINS = ("code", "docs", "licence", "tables")
HELD_OUT_SHARE = 8  # one document in eight is held out


@dataclass(frozen=True)
class Document:
    """One text. `name` says where it comes from, relative to the Python installation."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Domain:
    """The training text of a domain, joined, and its held-out documents."""

    name: str
    training: bytes
    num_training_documents: int
    held_out: tuple[Document, ...]


@dataclass(frozen=True)
class Excerpt:
    """A short piece of a held-out document, which the training text does not contain."""

    domain: str
    source: str
    offset: int
    data: bytes


# ---------------------------------------------------------------------------- the four domains


def iter_code() -> Iterator[Document]:
    """Top-level modules of the standard library (packages would add tests and data)."""
    for path in _standard_library().glob("*.py"):
        # _sysconfigdata holds the paths of the machine that built Python, not a program.
        if not path.name.startswith("_sysconfigdata"):
            yield Document(path.name, path.read_bytes())


def iter_docs() -> Iterator[Document]:
    """The language reference behind `help()`: one document per topic."""
    for topic, text in pydoc_data.topics.topics.items():
        yield Document(topic, text.encode())


def iter_licence() -> Iterator[Document]:
    """Licence files of the packages named in `licence_wheels.txt`, each text once.

    A fixed list, so that installing one more tool does not change the text. Most packages carry
    one of a few texts under another copyright line; texts that differ only there, in case or in
    white space count as one.
    """
    root = Path(sysconfig.get_path("purelib"))
    listed = (Path(__file__).parent / "licence_wheels.txt").read_text(encoding="utf-8").split()
    seen: set[bytes] = set()
    for path in sorted(root.glob("*.dist-info/**/*")):
        if path.relative_to(root).parts[0].split("-")[0].lower() not in listed:
            continue
        is_licence = any(word in path.name.upper() for word in ("LICEN", "COPYING", "NOTICE"))
        if not is_licence or not path.is_file():
            continue
        data = path.read_bytes()
        key = _words_without_copyright_lines(data)
        if key not in seen:
            seen.add(key)
            yield Document(path.relative_to(root).as_posix(), data)


def iter_tables() -> Iterator[Document]:
    """Tables of characters and numbers: the single-byte encodings, and the entities of HTML."""
    for path in (_standard_library() / "encodings").glob("*.py"):
        data = path.read_bytes()
        start = data.find(b"### Decoding")
        if start >= 0:  # above it is the same class definition in every file
            yield Document(f"encodings/{path.name}", data[start:])
    entities = _standard_library() / "html" / "entities.py"
    yield Document("html/entities.py", entities.read_bytes())


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _words_without_copyright_lines(data: bytes) -> bytes:
    lines = data.lower().splitlines()
    return b" ".join(word for line in lines if b"copyright" not in line for word in line.split())


# ------------------------------------------------------------------------------ split and draw


def load_corpus() -> tuple[Domain, ...]:
    """Every domain, split into training text and held-out documents."""
    sources = {"code": iter_code, "docs": iter_docs, "licence": iter_licence, "tables": iter_tables}
    return tuple(_split(name, tuple(sources[name]())) for name in DOMAINS)


def _split(name: str, documents: tuple[Document, ...]) -> Domain:
    by_hash = sorted(documents, key=lambda document: hashlib.sha256(document.data).digest())
    num_held_out = max(1, len(by_hash) // HELD_OUT_SHARE)
    held_out, training = by_hash[:num_held_out], by_hash[num_held_out:]
    text = b"\n".join(document.data for document in training)
    return Domain(name, text, len(training), tuple(held_out))


def draw_excerpts(
    corpus: tuple[Domain, ...], *, length: int, per_domain: int, seed: int
) -> tuple[Excerpt, ...]:
    """`per_domain` excerpts of each domain, `length` bytes each, the domains taking turns."""
    training = tuple(domain.training for domain in corpus)
    columns = [_draw_from(domain, training, length, per_domain, seed) for domain in corpus]
    return tuple(excerpt for row in zip(*columns, strict=True) for excerpt in row)


def _draw_from(
    domain: Domain, training: tuple[bytes, ...], length: int, count: int, seed: int
) -> list[Excerpt]:
    """Excerpts at random places, going round the held-out documents, without overlap."""
    random_source = random.Random(f"{seed}/{domain.name}/{length}")
    long_enough = [document for document in domain.held_out if len(document.data) >= length]
    drawn: list[Excerpt] = []
    for attempt in range(1000 * count):
        if len(drawn) == count:
            return drawn
        document = long_enough[attempt % len(long_enough)]
        offset = random_source.randrange(len(document.data) - length + 1)
        data = document.data[offset : offset + length]
        overlaps = any(
            other.source == document.name and abs(other.offset - offset) < length for other in drawn
        )
        if not overlaps and not any(data in text for text in training):
            drawn.append(Excerpt(domain.name, document.name, offset, data))
    raise RuntimeError(
        f"domain {domain.name}: found only {len(drawn)} of {count} excerpts of {length} bytes "
        f"that the training text does not contain, in {len(domain.held_out)} held-out documents"
    )


def corpus_facts(corpus: tuple[Domain, ...]) -> dict[str, object]:
    """Sizes and SHA-256 of the text, without the text: what `corpus.json` holds."""
    return {
        "python_version": platform.python_version(),
        "domains": {domain.name: _domain_facts(domain) for domain in corpus},
    }


def _domain_facts(domain: Domain) -> dict[str, object]:
    held_out = b"\n".join(document.data for document in domain.held_out)
    return {
        "training": {
            "num_documents": domain.num_training_documents,
            "size_bytes": len(domain.training),
            "sha256": hashlib.sha256(domain.training).hexdigest(),
        },
        "held_out": {
            "num_documents": len(domain.held_out),
            "size_bytes": len(held_out),
            "sha256": hashlib.sha256(held_out).hexdigest(),
        },
    }
