"""Files written by hand, so that every field can be wrong."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import CheckpointError

Writer = Callable[..., Path]

# Each client reads the certificates of all authorities anew.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)


def refusal(path: str | Path, name: str = "t") -> CheckpointError:
    """Why a checkpoint, or a tensor of it, is not read: in one sentence."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).read(name)
    assert caught.value.exit_code == 3
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message
    return caught.value


def why(path: str | Path, name: str = "t") -> str:
    return refusal(path, name).message


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of torch saved, in ``dcp``, ``slices`` and ``whole``."""
    from tests.unit.checkpoint.save_two_ranks import save

    return save(tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def write_raw(tmp_path: Path) -> Writer:
    """Write ``length | header | data`` with any of the three forged."""

    def write(
        header: dict[str, Any] | bytes,
        num_data: int = 0,
        name: str = "model.safetensors",
        length: int | None = None,
    ) -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        claimed = len(raw) if length is None else length
        path.write_bytes(claimed.to_bytes(8, "little") + raw + bytes(num_data))
        return path

    return write


@pytest.fixture
def entry() -> Callable[..., dict[str, Any]]:
    """The description of one F32 vector of two, with changes."""

    def make(**changes: Any) -> dict[str, Any]:
        return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}

    return make
