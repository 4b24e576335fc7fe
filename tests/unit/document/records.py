"""Facts of a run, as every report of a study gets them."""

import functools
from pathlib import Path
from typing import Any

import moegeom as mg
from moegeom.checkpoint.open import open_checkpoint
from moegeom.engine.run_facts import run_facts
from moegeom.engine.trust import Trust
from moegeom.router.load import load_routers
from moegeom.tokens.open import open_tokens
from tests.records import shared

SAMPLE = Path(__file__).resolve().parents[3] / "sample_ckpts/olmoe-balanced"


@functools.cache
def sample_run() -> dict[str, Any]:
    """``run.json`` of a sample and its recording, without having measured anything."""
    routers = load_routers(open_checkpoint(SAMPLE / "step_1500"))
    source = open_tokens(str(SAMPLE / "rec/step_1500"))
    trust = Trust("matches", 1.0, 1.0)
    facts = run_facts(routers, routers.routers, source.facts, trust)
    return facts | {"seconds": 1.0, "layers_requested": None}


@shared
def scanned_sample() -> mg.Report[Any]:
    """A scan of the sample and its recording."""
    return mg.scan(SAMPLE / "step_1500", tokens=SAMPLE / "rec/step_1500")
