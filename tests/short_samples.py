"""The sample checkpoints with recordings of their first 1,024 tokens: for what needs no more."""

from pathlib import Path

from moegeom.tokens.open import open_tokens
from tests.columns import recording_of
from tests.records import new_folder, shared

SAMPLES = Path(__file__).resolve().parents[1] / "sample_ckpts"

NUM_TOKENS = 1024


@shared
def short_samples() -> Path:
    """A folder like ``sample_ckpts``: the same checkpoints, a quarter of their tokens."""
    folder = new_folder()
    for checkpoint in SAMPLES.glob("*/step_*"):
        place = folder / checkpoint.relative_to(SAMPLES)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(checkpoint, target_is_directory=True)
    for recording in SAMPLES.glob("*/rec/step_*"):
        _cut(recording, folder / recording.relative_to(SAMPLES))
    return folder


def _cut(recording: Path, short: Path) -> None:
    source = open_tokens(str(recording))
    facts, routers = source.facts, source.facts.routers
    short.parent.mkdir(exist_ok=True)
    recording_of(
        *(short, facts.stage, source.read_columns(0, NUM_TOKENS)),
        {router: source.read_values(router, 0, NUM_TOKENS) for router in routers},
        {router: source.read_chosen(router, 0, NUM_TOKENS) for router in routers},
        checkpoint_name=f"{recording.parents[1].name}/{recording.name}",
        fingerprint=facts.fingerprint,
        engine=facts.engine,
        domains=facts.domains,
        dtype="float32",
    )
