"""What this installation can do, as rows of a table."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moegeom import __version__
from moegeom.scan.plan import num_workers
from moegeom.scan.run_facts import arithmetic_facts

#: Packages by the extra that brings them; the core comes first.
_PACKAGES = {
    "core": ("numpy", "scipy", "numba", "pyarrow", "safetensors", "ml_dtypes"),
    "torch": ("torch",),
    "capture": ("transformers",),
    "gguf": ("gguf",),
    "hub": ("huggingface_hub", "fsspec"),
    "cuda12 or cuda13": ("cupy",),
    "ray": ("ray",),
}


def diagnose() -> list[dict[str, str]]:
    """Versions and abilities; imports nothing but NumPy's BLAS."""
    blas = arithmetic_facts("cpu")
    rows = [
        _row("moegeom", __version__, "Python " + platform.python_version()),
        _row("processors", str(num_workers()), "worker threads of a scan, one BLAS thread each"),
        _row("BLAS", f"{blas['blas']} {blas['blas_version']}", f"core {blas['blas_core']}"),
    ]
    if (blas["blas_core"] or "").lower() in ("haswell", "prescott") and _has_avx512():
        text = "this processor has AVX-512: an OPENBLAS_CORETYPE preset may halve its speed"
        rows.append(_row("BLAS core", "slow", text))
    for extra, packages in _PACKAGES.items():
        rows += [_package(name, extra) for name in packages]
    return rows


def _package(name: str, extra: str) -> dict[str, str]:
    if importlib.util.find_spec(name) is None:
        return _row(name, "absent", f'pip install "moegeom[{extra.split(maxsplit=1)[0]}]"')
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "present"
    return _row(name, found, "core" if extra == "core" else f"extra {extra}")


def _has_avx512() -> bool:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            return "avx512f" in file.read(1 << 20)
    except OSError:
        return False


def _row(what: str, found: str, text: str) -> dict[str, str]:
    return {"what": what, "found": found, "meaning": text}
