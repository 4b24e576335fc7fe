"""Results to something a person or a program reads; begins from the results directory alone."""

from moegeom.document.model import Document, View

__all__ = ["Document", "View"]
