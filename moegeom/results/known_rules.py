"""Rules that recorded choices have verified, remembered by the fingerprint of their routers.

One small JSON file for each fingerprint; a file that is damaged is as good as none.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from moegeom.core.router import RouterSet

#: Recorded choices that must be looked at, and the share of them that must follow from the rule.
LEAST_TOKENS = 256
LEAST_SHARE = 0.99

_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class KnownRule:
    """Which recording verified a rule: its name, how many tokens were compared, and the share."""

    rule: str
    recording: str
    num_tokens: int
    share: float

    @property
    def sentence(self) -> str:
        return f"verified before by recording {self.recording} ({self.num_tokens:,} tokens)"


def rule_digest(routers: RouterSet) -> str:
    """Tells apart sets of rules: equal for equal steps of every router."""
    steps = "\n".join(f"{router.name} {router.rule!r}" for router in routers.routers)
    return xxhash.xxh3_128_hexdigest(steps.encode())


def remember_rule(
    folder: Path, routers: RouterSet, recording: str, tokens: int, share: float
) -> None:
    """Writes down that the recording verified the rule, if it looked at enough; never in part.

    A folder that cannot be written is no error: the rule is verified again by the next recording.
    """
    if tokens < LEAST_TOKENS or share < LEAST_SHARE:
        return
    known = KnownRule(rule_digest(routers), recording[:200], tokens, share)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(known), file)
        Path(name).replace(folder / _file_name(routers.fingerprint))
    except OSError:
        return


def recall_rule(folder: Path, routers: RouterSet) -> KnownRule | None:
    """What verified the rule of these routers before; None when nothing did."""
    path = folder / _file_name(routers.fingerprint)
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        table = json.loads(path.read_bytes())
        found = KnownRule(
            str(table["rule"]), str(table["recording"]), int(table["num_tokens"]),
            float(table["share"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if found.rule == rule_digest(routers) else None


def _file_name(fingerprint: str) -> str:
    return fingerprint.rpartition(":")[2] + ".json"
