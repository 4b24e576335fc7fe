"""What a capture is asked; loads neither torch nor transformers, which run the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from moegeom.core.option import argument, option
from moegeom.engine.parameters import family_parameters
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily

#: The word of ``keep`` for sums over heads of attention, ``attention[:LAYERS]``.
ATTENTION = "attention"


@dataclass(frozen=True)
class TextFile:
    """A file of documents; ``domain`` is that of documents that do not name their own."""

    path: Path
    domain: str | None = None

    @classmethod
    def of(cls, text: str) -> TextFile:
        """``FILE`` or ``DOMAIN=FILE``; a file that exists by the whole name has no domain."""
        domain, sign, path = text.partition("=")
        return cls(Path(path), domain) if sign and not Path(text).exists() else cls(Path(text))

    @property
    def holds_many(self) -> bool:
        """Whether each line is a document; else the whole file is one."""
        return self.path.suffix.lower() in (".jsonl", ".ndjson")


@dataclass(frozen=True)
class CaptureRequest:
    """Which model reads which texts, and what is recorded of it.

    ``dtype`` None runs the model as it is stored, ``eager`` with the plainest attention and
    experts (numbers that do not depend on which fused kernels are there), ``device`` is one of
    torch's, or ``auto`` for transformers' own placement. ``tokens_per_document`` None spreads the
    tokens over all documents.
    """

    PYTHON_ONLY: ClassVar = tuple(n for n in family_parameters(NOTHING_ASKED) if n != "family")

    model: Path = argument("Folder with a model that transformers can load.")
    text: tuple[str, ...] = option(
        "Text, one document; or .jsonl, one per line (text or token_ids, domain). "
        "May be given several times.",
        dataclasses.MISSING,
        metavar="[DOMAIN=]FILE",
    )
    out: Path = option("The recording; must not exist.", dataclasses.MISSING)
    keep: str | None = option(
        "hidden, logits, top-logits:M, ids, outputs, outputs:every-expert, or attention[:LAYERS] "
        "for moegeom research attention [default: top-logits, or logits where the largest do not "
        "decide].",
        metavar="WHAT",
    )
    num_tokens: int = option("Stop after so many tokens.", 16_384, min=1)
    tokens_per_document: int | None = option(
        "At most so many of each document [default: evenly over them, at least 256 of each, the "
        "first documents first].",
        min=1,
    )
    length: int | None = option("Tokens read at once [default: 2048 or fewer].", min=1)
    dtype: str | None = option("float32, bfloat16, ... [default: as stored].")
    device: str = option("cpu, cuda, cuda:1, ...; auto spreads the model.", "cpu")
    eager: bool = option("Plain attention and experts, no fused kernels.", False)
    tokenizer: str | None = option("Folder of another tokenizer, or bytes.")
    flips: int | None = option(
        "Then flip so many tokens at each router, one at a time, and record what the model's next "
        "tokens are: two passes over 256 tokens for each flip.",
        min=1,
    )
    fold: bool = option("Write results of a scan instead of a recording.", False)
    restart: bool = option("Discard unfinished results instead of going on.", False)
    requested_family: RequestedFamily = field(default=NOTHING_ASKED)

    @cached_property
    def texts(self) -> tuple[TextFile, ...]:
        """The files of ``text``."""
        return tuple(map(TextFile.of, self.text))

    @property
    def is_attention(self) -> bool:
        """Whether sums over heads of attention are asked for, and no recording for scans."""
        return (self.keep or "").partition(":")[0] == ATTENTION

    @property
    def attention_layers(self) -> str | None:
        """The layers of ``attention:LAYERS``; None for all."""
        return (self.keep or "").partition(":")[2] or None
