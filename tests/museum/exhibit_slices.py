"""Incidents of slices and configs: tensors and config that contradict each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.museum.checkpoint import Checkpoint, Part
from tests.museum.gallery import Case, Incident
from tests.museum.healthy import sigmoid_model, softmax_model


def _sliced(part: Part, axis: int) -> Callable[[], Checkpoint]:
    """The first half of one part along an axis, in every layer."""

    return lambda: sigmoid_model().edited(part, lambda v, _: np.array_split(v, 2, axis)[0])


SLICE_AS_WHOLE = Incident(
    "slice_as_whole",
    ("pytorch/pytorch#154742", "ByteDance-Seed/VeOmni#461"),
    "A sharded save writes a slice of each tensor in each file, under the same name; read without "
    "the offsets in the header, a slice is taken for the tensor.",
    "MGI105",
    (
        Case("half of the selection bias", _sliced("bias", 0), ("MGI105",)),
        Case("half of the columns of the router", _sliced("weight", 1), ("MGI105",)),
        Case("half of the rows of the router", _sliced("weight", 0), ("MGI105",)),
    ),
    (Case("the slices joined", sigmoid_model),),
)


def _all_sliced(*parts: tuple[Part, int]) -> Callable[[], Checkpoint]:
    """The first half of several parts, each along its axis."""

    def build() -> Checkpoint:
        model = sigmoid_model()
        for part, axis in parts:
            model = model.edited(part, lambda v, _, axis=axis: np.array_split(v, 2, axis)[0])
        return model

    return build


EVERY_PART_SLICED = Incident(
    "every_part_sliced",
    ("pytorch/pytorch#154742",),
    "The same when all parts were cut alike, so that they agree with each other and only the "
    "config knows better.",
    "MGI105",
    (
        Case(
            "half of the columns and of the gain",
            _all_sliced(("weight", 1), ("gain", 0)),
            ("MGI105",),
        ),
        Case(
            "half of the rows and of the biases",
            _all_sliced(("weight", 0), ("bias", 0)),
            ("MGI105",),
        ),
        Case(
            "half of everything",
            _all_sliced(("weight", 0), ("weight", 1), ("bias", 0), ("gain", 0)),
            ("MGI105",),
        ),
    ),
    (Case("the slices joined", sigmoid_model),),
)

CONFIG_OF_ANOTHER = Incident(
    "config_of_another_revision",
    (),
    "The config beside the weights is that of another revision of the model.",
    "MGI105",
    (
        Case(
            "one more layer than there are routers",
            lambda: softmax_model().changed(config={"num_hidden_layers": 5}),
            ("MGI105",),
        ),
        Case(
            "twice the experts",
            lambda: softmax_model().changed(config={"num_experts": 64}),
            ("MGI105",),
        ),
        Case(
            "more experts chosen than there are",
            lambda: softmax_model().changed(config={"num_experts_per_tok": 64}),
            ("MGI105",),
        ),
    ),
    (Case("its own config", softmax_model),),
)


def _lost(rows: int, layers: tuple[int, ...]) -> Callable[[], Checkpoint]:
    return lambda: softmax_model().edited("weight", lambda w, _: w[:-rows], layers)


FEWER_EXPERTS = Incident(
    "gate_of_fewer_experts",
    (),
    "A pruning or a merge left gates of fewer experts than the config says there are.",
    "MGI105",
    (
        Case("one row less in one layer", _lost(1, (2,)), ("MGI105",)),
        Case("eight rows less in two layers", _lost(8, (1, 2)), ("MGI105",)),
        Case("half of the rows in all layers", _lost(16, (0, 1, 2, 3)), ("MGI105",)),
    ),
    (
        Case(
            "half of the rows, and the config says so",
            lambda: _lost(16, (0, 1, 2, 3))().changed(config={"num_experts": 16}),
        ),
    ),
)

INCIDENTS = (SLICE_AS_WHOLE, EVERY_PART_SLICED, CONFIG_OF_ANOTHER, FEWER_EXPERTS)
