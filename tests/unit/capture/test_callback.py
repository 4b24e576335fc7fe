"""What a Trainer's steps fold, against a recorder in a loop of the test's own; the training itself
against the same training without the callback.
"""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from moegeom.core.errors import RecordingError, UsageError
from moegeom.recorder import FoldCallback, RouterRecorder
from moegeom.results.reader import open_results
from moegeom.studies.track.study import TrackRequest, track
from tests.unit.capture.test_two_ranks import assert_same_results
from tests.unit.capture.trained import Batches, OtherPasses, losses, texts, tiny_model, trainer_of

DATA = texts(16)


#: peft reads a property of transformers by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")


def _lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))


#: What a training may be like: what is done to the model, and arguments of the Trainer.
TRAININGS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "compiled, accumulating, padded, with evaluations": (
        lambda model: model,
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "logging_strategy": "no",
            "torch_compile": True,
            "torch_compile_backend": "eager",
        },
    ),
    "of adapters, checkpointing activations": (_lora, {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_model_trains_bit_for_bit_as_without_and_its_own_passes_are_folded(name, tmp_path):
    make, arguments = TRAININGS[name]
    trainers = []
    for folds in (False, True):
        model = make(tiny_model())
        before = deepcopy(model)
        trainer = trainer_of(model, tmp_path, DATA, **arguments)
        trainer.add_callback(OtherPasses())
        batches = Batches(model)
        if folds:
            trainer.add_callback(FoldCallback(trainer, tmp_path / "runs", every=2))
        trainer.train()
        trainers.append(trainer)
    alone, folded = trainers
    assert losses(folded) == losses(alone)
    assert len(losses(alone)) == 3
    torch.testing.assert_close(
        folded.model.state_dict(), alone.model.state_dict(), rtol=0.0, atol=0.0
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["step_0", "step_2"]
    with torch.no_grad(), RouterRecorder(before, tmp_path / "own", fold=True) as recorder:
        for batch in batches.found[:2]:
            recorder.tokens(batch["input_ids"], batch["attention_mask"])
            before.train()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert_same_results(tmp_path / "runs" / "step_0", tmp_path / "own")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_of(tiny_model(), folder, texts(16, with_mask=False))
    trainer.add_callback(FoldCallback(trainer, folder / "runs", every=2, layer_groups=1))
    trainer.train()
    return trainer, folder / "runs"


def test_the_trainer_logs_the_worst_router_of_a_group(run):
    trainer, runs = run
    logged = [e for e in trainer.state.log_history if any(k.startswith("routers/") for k in e)]
    assert [entry["step"] for entry in logged] == [0, 2]
    for entry in logged:
        rows = open_results(runs / f"step_{entry['step']}").layers().to_pylist()
        for figure, pick in (("max_vio_global", max), ("routing_entropy_normalised", min)):
            worst = pick(rows, key=lambda row: row[figure])
            assert entry[f"routers/text.0-1/{figure}"] == worst[figure]
            assert entry[f"routers/text.0-1/{figure}_layer"] == worst["layer"]
    assert all(isinstance(v, int | float) for entry in logged for v in entry.values())
    assert len(losses(trainer)) == 3


def test_without_a_mask_padding_is_what_bears_no_label_and_a_series_reads_the_steps(run, tmp_path):
    """The padding token inside a text has a label."""
    num_tokens = sum(label != -100 for text in DATA[:4] for label in text["labels"])
    assert open_results(run[1] / "step_0").run["tokens"]["num_tokens"] == num_tokens
    series = track(TrackRequest((f"{run[1]}/step_*",), out=tmp_path / "series"))
    assert [step.step for step in series.steps] == [0, 2]
    assert {curve.router for curve in series.of_column("max_vio_global")} == {"text/0", "text/1"}


def test_packed_documents_are_told_by_their_positions(tmp_path):
    positions = [*range(10), *range(14)]
    data = [text | {"position_ids": positions} for text in texts(16, with_mask=False)]
    trainer = trainer_of(tiny_model(), tmp_path, data, max_steps=1)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs"))
    trainer.train()
    tokens = open_results(tmp_path / "runs" / "step_0").run["tokens"]
    long = sum(text["labels"][10] != -100 for text in DATA[:4])
    assert tokens["num_documents"] == 4 + long


class _Breaks(RouterRecorder):
    steps: tuple[str, ...] = ()

    def tokens(self, *arguments: Any, **named: Any) -> None:
        if self._out.name in self.steps:
            raise RecordingError("broken.")
        super().tokens(*arguments, **named)


def test_a_measurement_that_fails_later_ends_no_training_and_no_step_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("moegeom.recorder.callback.RouterRecorder", _Breaks)
    monkeypatch.setattr(_Breaks, "steps", ("step_1",))
    trainer = trainer_of(tiny_model(), tmp_path, DATA, max_steps=3)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "runs", every=1))
    with pytest.warns(RuntimeWarning, match=r"step_1 was not measured: broken"):
        trainer.train()
    assert [p.name for p in sorted((tmp_path / "runs").iterdir())] == ["step_0", "step_2"]
    assert len(losses(trainer)) == 3
    monkeypatch.setattr(_Breaks, "steps", ("step_0",))
    trainer = trainer_of(tiny_model(), tmp_path, DATA, max_steps=1)
    trainer.add_callback(FoldCallback(trainer, tmp_path / "other", every=1))
    with pytest.raises(RecordingError, match="broken"):
        trainer.train()
    trainer = trainer_of(tiny_model(), tmp_path, DATA)
    with pytest.raises(UsageError, match="every=0"):
        FoldCallback(trainer, tmp_path, every=0)
