"""The record behind a document as one line of JSON; what is not known is null."""

from __future__ import annotations

from moegeom.document.model import Document, View
from moegeom.document.render import Renderer
from moegeom.document.strict_json import document_text


def render(document: Document, view: View) -> str:
    """Infinities are the strings "inf" and "-inf"."""
    del view
    return document_text(document.record())


RENDERER = Renderer("json", render)
