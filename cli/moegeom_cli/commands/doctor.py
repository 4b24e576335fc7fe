"""``moegeom doctor``: what this installation can do."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from moegeom_cli.command import Group
from moegeom_cli.groups import PrintFormat, command
from moegeom_cli.streams import Format

#: Packages by the extra that brings them; the core comes first.
_PACKAGES = {
    "core": ("numpy", "scipy", "sklearn", "numba", "pyarrow", "safetensors", "ml_dtypes"),
    "torch": ("torch",),
    "capture": ("transformers",),
    "gguf": ("gguf",),
    "hub": ("huggingface_hub", "fsspec"),
    "plots": ("matplotlib",),
    "cuda12 or cuda13": ("cupy",),
}

#: Distributions that bring a package of another name.
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x"), "sklearn": ("scikit-learn",)}


@command(Group.more, 2, "moegeom doctor")
def doctor(format: PrintFormat = Format.table) -> None:
    """What is installed: versions, BLAS, extras."""
    from moegeom.core.extras import install_command
    from moegeom_cli.listing import render_listing

    rows = _rows()
    typer.echo(render_listing(rows, format, "doctor"))
    absent = {row["meaning"] for row in rows if row["found"] == "absent"}
    if format is Format.table and "core" in absent:
        typer.echo(f"\nTo have the whole core: {install_command()}")
    if format is Format.table and absent - {"core"}:
        typer.echo(f"\nTo add an extra: {install_command('EXTRA')}")


def _rows() -> list[dict[str, str]]:
    """Versions and abilities; imports nothing but NumPy's BLAS, and CuPy where it is installed."""
    from moegeom import __version__
    from moegeom.engine.plan import num_workers
    from moegeom.engine.run_facts import arithmetic_facts

    blas = arithmetic_facts("cpu")
    rows = [
        _row("moegeom", __version__, "Python " + platform.python_version()),
        _row("processors", str(num_workers()), "worker threads of a scan, one BLAS thread each"),
        _row("BLAS", f"{blas['blas']} {blas['blas_version']}", f"core {blas['blas_core']}"),
    ]
    if (blas["blas_core"] or "").lower() in ("haswell", "prescott") and _has_avx512():
        text = "this processor has AVX-512: an OPENBLAS_CORETYPE preset may halve its speed"
        rows.append(_row("BLAS core", "slow", text))
    rows.append(_gpus())
    for extra, packages in _PACKAGES.items():
        rows += [_package(name, extra) for name in packages]
    return rows


def _gpus() -> dict[str, str]:
    from moegeom.engine.devices.choice import usable_devices

    devices, reasons = usable_devices()
    names = ", ".join(f"cuda:{number} {device.name}" for number, device in devices.items())
    text = " ".join([names, *reasons]).strip() or "CuPy finds none"
    return _row("GPU", str(len(devices) or "none"), text)


def _package(name: str, extra: str) -> dict[str, str]:
    from moegeom.core.extras import is_installed

    brought_by = extra if extra == "core" else f"extra {extra}"
    if not is_installed(name):
        return _row(name, "absent", brought_by)
    state = "present"
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            state = version(distribution)
        except PackageNotFoundError:
            continue
    return _row(name, state, brought_by)


def _has_avx512() -> bool:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            return "avx512f" in file.read(1 << 20)
    except OSError:
        return False


def _row(what: str, state: str, text: str) -> dict[str, str]:
    return {"what": what, "found": state, "meaning": text}
