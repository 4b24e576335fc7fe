"""Result files of trainings: what they hold, and how they grow by a run at a time."""

from __future__ import annotations

import datetime as dt
import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.trained.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks/results/trained"

#: What must agree before runs may stand beside each other in one file.
SAME = ("settings", "core", "versions", "text")


@dataclass
class ResultFile:
    """Facts, and runs that are written as they come: an interruption loses one."""

    path: Path
    facts: dict[str, Any]
    runs: list[dict[str, Any]]

    @classmethod
    def open(cls, path: Path, facts: dict[str, Any]) -> ResultFile:
        """The file with its runs, to be added to; a new one where there is none.

        Raises
        ------
        ValueError
            Where the runs in it were made under other settings, on another core or text.
        """
        commit()  # of the program as it was read, not as it stands when the first run is done
        if not path.exists():
            return cls(path, facts, [])
        held = read(path)
        differ = [name for name in SAME if held.facts.get(name) != facts[name]]
        if differ:
            raise ValueError(
                f"{path}: its runs have another {', another '.join(differ)} than this one would; "
                "remove it, or write to another --out"
            )
        return held

    def has(self, **key: object) -> bool:
        """Whether a run with these values is there."""
        return any(all(run.get(k) == v for k, v in key.items()) for run in self.runs)

    def add(self, runs: Iterable[dict[str, Any]]) -> None:
        """Adds runs, each with the commit it was made at, and writes the whole file anew."""
        now = {"commit": commit(), "date": dt.datetime.now(dt.UTC).date().isoformat()}
        self.runs += [run | now for run in runs]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in self.runs)
        head = json.dumps(self.facts, indent=1)[:-2]
        partial.write_text(f'{head},\n "runs": [\n{lines}\n]}}\n', "utf-8")
        partial.replace(self.path)


def read(path: Path) -> ResultFile:
    """A result file as it is."""
    held = json.loads(path.read_text("utf-8"))
    return ResultFile(path, held, held.pop("runs"))


def facts_of(claim: str, settings: Settings, text: dict[str, str]) -> dict[str, Any]:
    """What every run of a file has in common."""
    import numpy as np
    import torch

    import moegeom

    return {
        "claim": claim,
        "settings": {k: v for k, v in asdict(settings).items() if k != "seeds"},
        "core": core_name(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "moegeom": moegeom.__version__,
        },
        "text": text,
    }


def core_name() -> str:
    """The processor, and the instructions that torch uses on it."""
    import torch

    name = platform.processor() or platform.machine()
    about = Path("/proc/cpuinfo")
    if about.is_file():
        lines = about.read_text("utf-8", "replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, one thread"


@cache
def commit() -> str:
    """The commit of the working tree when it was first asked for."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
