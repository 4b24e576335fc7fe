"""Sample checkpoints, as models that run and with the recordings made of them elsewhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moegeom.core.tokens import TokenSource
from moegeom.tokens.sources.recorded import open_recording

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"
NAMES = ("olmoe-balanced", "olmoe-collapsed", "deepseek-tiny")


@dataclass(frozen=True)
class Sample:
    path: Path
    model: Any
    recording: TokenSource

    def documents(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Number, domain and token ids [1, tokens], in the order of the recording."""
        columns = self.recording.read_columns(0, self.recording.facts.num_tokens)
        for number in np.unique(columns.document):
            rows = columns.document == number
            domain = self.recording.facts.domains[columns.domain[rows][0]]
            yield int(number), domain, torch.from_numpy(columns.token_id[rows]).long()[None]


@cache
def sample_of(name: str) -> Sample:
    path = SAMPLES / name / "step_1500"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    recording = open_recording(SAMPLES / name / "rec" / "step_1500")
    return Sample(path, model.eval(), recording)


@pytest.fixture
def balanced() -> Iterator[Sample]:
    with torch.no_grad():
        yield sample_of("olmoe-balanced")
