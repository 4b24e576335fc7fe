"""Whatever the bytes, the answer is a value or a MoeGeomError, soon and in little memory."""

from __future__ import annotations

import json
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import MoeGeomError
from moegeom.router.load import load_routers
from tests.fuzz.mutations import mutate, rounds

_SECONDS = 2.0
_MEGABYTES = 200

_WORDS = [
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"-1", b"NaN", b"Infinity", b"null", b"1e999",
    b"99999999999999999999999", b"[" * 3000, b"\xff", b"\\ud800", b"../x", b"F8_E4M3", b"F4",
    b"true", b"0", b'"shape"', b"18446744073709551615", b"9" * 4400, b"\x00",
]  # fmt: skip

_CONFIG = {
    "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False,
    "rms_norm_eps": 1e-5, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors: dict[str, np.ndarray] = {}
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors[f"{at}.mlp.gate.weight"] = np.ones((4, 8), np.float32)
        tensors[f"{at}.post_attention_layernorm.weight"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def _mutate(raw: bytes, draw: random.Random) -> bytes:
    return mutate(raw, draw, _WORDS, (1, 1, 2, 8, 40))


def _is_answered(folder: Path) -> bool:
    """True for a value, False for an error on purpose; anything else fails the test."""
    started = time.process_time()
    try:
        routers = load_routers(open_checkpoint(folder)).routers
    except MoeGeomError as error:
        assert str(error).isprintable() or "\n" in str(error)
        answer = False
    else:
        assert routers
        answer = True
    assert time.process_time() - started < _SECONDS
    return answer


@pytest.mark.parametrize(
    ("file", "count"),
    rounds(
        {
            "a.safetensors": (500, 4000),
            "model.safetensors.index.json": (250, 1500),
            "config.json": (250, 1500),
        }
    ),
)
def test_mutated_files_end_in_a_value_or_an_error_on_purpose(
    file: str, count: int, checkpoint: Path
) -> None:
    assert _is_answered(checkpoint)
    good = (checkpoint / file).read_bytes()
    draw = random.Random(f"moegeom {file}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = []
    for _ in range(count):
        # Half of the header mutations keep the length field true, so that the JSON is reached.
        if file.endswith(".safetensors") and draw.random() < 0.5:
            header = int.from_bytes(good[:8], "little")
            text = _mutate(good[8 : 8 + header], draw)
            bad = len(text).to_bytes(8, "little") + text + good[8 + header :]
        else:
            bad = _mutate(good, draw)
        (checkpoint / file).write_bytes(bad)
        answers.append(_is_answered(checkpoint))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < _MEGABYTES * 1024
    assert False in answers  # the mutations do bite


def test_random_bytes_are_refused(checkpoint: Path) -> None:
    draw = random.Random(7)
    for _ in range(200):
        (checkpoint / "a.safetensors").write_bytes(draw.randbytes(draw.randrange(300)))
        assert not _is_answered(checkpoint)
