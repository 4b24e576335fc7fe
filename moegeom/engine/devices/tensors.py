"""A source of nothing but facts, for inputs that are handed over instead of being read."""

from __future__ import annotations

from typing import NoReturn

from moegeom.core.errors import InternalError
from moegeom.core.tokens import SourceFacts


class Tensors:
    """Inputs of one router, any number of them, without documents and domains."""

    def __init__(self, router: str) -> None:
        self.facts = SourceFacts(
            name="tensors",
            stage="router_input",
            num_tokens=0,
            routers=(router,),
            domains=(),
            has_documents=False,
            has_chosen=False,
        )

    def read_columns(self, start: int, stop: int) -> NoReturn:
        raise InternalError("tensors are handed over, not read")

    def read_values(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_top_logits(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_chosen(self, router: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)

    def read_output(self, router: str, kind: str, start: int, stop: int) -> NoReturn:
        self.read_columns(start, stop)
