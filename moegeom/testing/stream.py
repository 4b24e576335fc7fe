"""A small synthetic token stream, for the theorems about metrics.

Inputs, weights and gains are small whole numbers over powers of two: every logit is exact in
float32 in whatever order it is summed, so two ways to the same figure must agree in every bit of
every choice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moegeom.core.errors import InternalError
from moegeom.core.router import GroupMask, Norm, Provenance, Router, Rule, Weights
from moegeom.core.shapes import Float32, Int64
from moegeom.core.tokens import SourceFacts, TokenColumns, TopLogits

EXPERTS, TOP_K, HIDDEN = 8, 3, 12
DOCUMENTS, DOCUMENT_TOKENS = 48, 64
DOMAINS = ("code", "prose", "tables")


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens as arrays: a source that a scan can read. ``row``: which tokens, in which order."""

    row: Int64[np.ndarray, "tokens"]
    inputs: Float32[np.ndarray, "all hidden"]
    outputs: dict[str, np.ndarray]

    @property
    def facts(self) -> SourceFacts:
        return SourceFacts(
            name="stream",
            stage="router_input",
            num_tokens=len(self.row),
            routers=("text/0",),
            domains=DOMAINS,
            has_documents=True,
            has_chosen=False,
            num_documents=DOCUMENTS,
            outputs=tuple(self.outputs),
        )

    def read_columns(self, start: int, stop: int) -> TokenColumns:
        row = self.row[start:stop]
        document = row // DOCUMENT_TOKENS
        return TokenColumns(
            document=document,
            position=(row % DOCUMENT_TOKENS).astype(np.int32),
            token_id=(row * row % 37).astype(np.int32),
            domain=(document % len(DOMAINS)).astype(np.int16),
        )

    def read_values(
        self, router: str, start: int, stop: int
    ) -> Float32[np.ndarray, "tokens hidden"]:
        return self.inputs[self.row[start:stop]]

    def read_chosen(self, router: str, start: int, stop: int) -> None:
        return None

    def read_top_logits(self, router: str, start: int, stop: int) -> TopLogits:
        raise InternalError("a stream holds router inputs")

    def read_output(self, router: str, kind: str, start: int, stop: int) -> np.ndarray | None:
        rows = self.outputs.get(kind)
        return None if rows is None else rows[self.row[start:stop]]

    def reordered(self, row: Int64[np.ndarray, "tokens"]) -> Stream:
        """The same tokens, or some of them, in another order."""
        return dataclasses.replace(self, row=row)


def stream(seed: int = 0) -> Stream:
    """A few thousand tokens in documents and domains that differ, two of them outliers."""
    random = np.random.default_rng(seed)
    tokens = DOCUMENTS * DOCUMENT_TOKENS
    document = np.arange(tokens) // DOCUMENT_TOKENS
    centre = random.integers(-200, 200, (DOCUMENTS, HIDDEN))[document]
    centre += random.integers(-300, 300, (len(DOMAINS), HIDDEN))[document % len(DOMAINS)]
    inputs = (centre + random.integers(-900, 900, (tokens, HIDDEN))) / np.float32(512)
    inputs[[5, 1000]] *= 64.0  # what attention sinks look like
    outputs = {
        "shared_output": random.standard_normal((tokens, HIDDEN)) + 1.0,
        "routed_output": random.standard_normal((tokens, HIDDEN)),
        "expert_output": random.standard_normal((tokens, EXPERTS, 4)),
    }
    singles = {name: values.astype(np.float32) for name, values in outputs.items()}
    return Stream(np.arange(tokens), inputs.astype(np.float32), singles)


#: Rules that the theorems are tried on.
RULES = {
    "softmax": Rule(TOP_K, "softmax", Weights("scores")),
    "sigmoid with selection bias": Rule(
        TOP_K, "sigmoid", Weights("scores", renormalise=True), has_selection_bias=True
    ),
    "sigmoid with groups": Rule(
        TOP_K,
        "sigmoid",
        Weights("scores", renormalise=True),
        has_selection_bias=True,
        groups=GroupMask(4, 2, "top2_sum", -np.inf),
    ),
}


def router(rule: Rule, seed: int = 1) -> Router:
    """A router with the rule; whole numbers over 64, a gain of powers of two."""
    random = np.random.default_rng(seed)
    weight = random.integers(-40, 40, (EXPERTS, HIDDEN)) / np.float32(64)
    bias = None
    if rule.has_selection_bias:
        bias = (random.integers(-32, 32, EXPERTS) / 256).astype(np.float32)
    gain = np.float32(2.0) ** random.integers(-1, 2, HIDDEN).astype(np.float32)
    return Router(
        name="text/0",
        stack="text",
        layer=0,
        weight=weight.astype(np.float32),
        rule=rule,
        provenance=Provenance("synthetic", (), "", "F32"),
        selection_bias=bias,
        gain=gain,
        norm=Norm("rms", 1e-6, "norm"),
    )
