"""The record behind a document as one line of JSON; what is not known is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from moegeom.document.model import Document, View
from moegeom.document.render import Renderer


def render(document: Document, view: View) -> str:
    """Infinities are the strings "inf" and "-inf"."""
    del view
    return document_text(document.record())


RENDERER = Renderer("json", render)


def document_text(document: Mapping[str, Any]) -> str:
    """The document on one line; infinities are the strings "inf" and "-inf", NaN is null."""
    return json.dumps(_strict(document), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
