"""Typed access to JSON that anyone may have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moegeom.core.errors import RecordingError
from moegeom.core.text import quoted


@dataclass(frozen=True)
class Fields:
    """A JSON object from outside; ``where`` begins every error."""

    document: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.document, dict):
            raise RecordingError(
                f"{self.where}: found {quoted(self.document)}; expected an object."
            )

    def any(self, key: str) -> Any:
        """Whatever is there."""
        if key not in self.document:
            raise RecordingError(f"{self.where}: '{key}' is missing.")
        return self.document[key]

    def _typed(self, key: str, kind: type, expected: str) -> Any:
        value = self.any(key)
        # type() and not isinstance(): JSON true is no number.
        if type(value) is not kind:
            raise RecordingError(f"{self.where}: '{key}' is {quoted(value)}; expected {expected}.")
        return value

    def number(self, key: str) -> int:
        """A whole number from 0 to 2^62."""
        value = self._typed(key, int, "a whole number")
        if not 0 <= value < 1 << 62:
            raise RecordingError(f"{self.where}: '{key}' is {quoted(value)}; expected 0 to 2^62.")
        return value

    def number_or_none(self, key: str) -> int | None:
        """A whole number, or null."""
        return None if self.any(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._typed(key, bool, "true or false")

    def text(self, key: str) -> str:
        """A text."""
        return self._typed(key, str, "a text")

    def list(self, key: str) -> list[Any]:
        """A list of anything."""
        return self._typed(key, list, "a list")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.list(key)
        if not all(type(item) is str for item in found):
            raise RecordingError(f"{self.where}: '{key}' holds more than texts.")
        return tuple(found)

    def some_of(self, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """A list of words out of ``known``, each once; empty when the key is absent."""
        found = self.texts(key) if key in self.document else ()
        unknown = [word for word in found if word not in known]
        if unknown or len(set(found)) < len(found):
            wrong = quoted(unknown[0]) if unknown else "the same word twice"
            raise RecordingError(
                f"{self.where}: '{key}' holds {wrong}; expected some of {', '.join(known)}."
            )
        return found

    def one_of(self, key: str, known: tuple) -> Any:
        """One of ``known``, which may hold None."""
        value = self.any(key)
        if not isinstance(value, str | None) or value not in known:
            listed = ", ".join("null" if name is None else name for name in known)
            raise RecordingError(
                f"{self.where}: '{key}' is {quoted(value)}; expected one of {listed}."
            )
        return value
