"""Result files of benchmarks on a device: what they hold, and how they are written.

A file says on which device, with which driver and libraries and at which commit its figures were
taken; ``tests/architecture/test_device_results.py`` reads every one of them.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")

#: Facts that every result file has.
FACTS = ("claim", "device", "driver", "cuda_runtime", "cupy", "numpy", "python", "commit", "date")


def device_facts(claim: str, commit: str, index: int = 0) -> dict[str, Any]:
    """Where and with what the figures of ``claim`` are taken."""
    import cupy
    import numpy as np

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    return {
        "claim": claim,
        "device": properties["name"].decode(),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "driver": _driver(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def _driver() -> str:
    """The driver's version as it names itself; else the CUDA version that it supports."""
    file = Path("/proc/driver/nvidia/version")
    if file.is_file():
        words = file.read_text("utf-8", "replace").split()
        numbers = [word for word in words if word.replace(".", "").isdigit() and "." in word]
        if numbers:
            return numbers[0]
    import cupy

    return f"CUDA {cupy.cuda.runtime.driverGetVersion()}"


def write_results(path: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON document: the facts, and ``rows`` of figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n", "utf-8")
