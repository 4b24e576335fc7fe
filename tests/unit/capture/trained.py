"""A tiny model, padded texts, and a Trainer of transformers on the processor."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

PAD, LENGTH = 0, 24

#: Micro-batches of two sequences, and as many of them as a step accumulates.
BATCH, ACCUMULATED = 2, 2


SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_experts": 8,
    "vocab_size": 64,
    "pad_token_id": PAD,
    "eos_token_id": 1,
}


def tiny_model(seed: int = 0, **options: Any) -> OlmoeForCausalLM:
    torch.manual_seed(seed)
    return OlmoeForCausalLM(OlmoeConfig(**SIZES, **options))


def texts(count: int, with_mask: bool = True) -> list[dict[str, list[int]]]:
    """Sequences of many lengths, padded on the right, without labels where padded."""
    draw = np.random.default_rng(0)
    found = []
    for length in draw.integers(5, LENGTH + 1, count):
        ids = np.full(LENGTH, PAD)
        ids[:length] = draw.integers(2, 64, length)
        kept = np.arange(LENGTH) < length
        one = {"input_ids": ids.tolist(), "labels": np.where(kept, ids, -100).tolist()}
        if with_mask:
            one["attention_mask"] = kept.astype(int).tolist()
        found.append(one)
    return found


def trainer_of(
    model: Any, folder: Path, data: list[dict[str, list[int]]], **arguments: Any
) -> Trainer:
    """Texts in their order; nothing is saved, and every step is logged."""
    told = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **{"max_steps": 3, "gradient_accumulation_steps": ACCUMULATED, **arguments},
    )
    return Trainer(model, told, train_dataset=data, eval_dataset=data[:2])


class Batches(TrainerCallback):
    def __init__(self, model: torch.nn.Module) -> None:
        self.found: list[dict[str, torch.Tensor]] = []
        model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            kept = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
            self.found.append({k: v.clone() for k, v in kept.items()})


class OtherPasses(TrainerCallback):
    """Runs the model on other tokens between two micro-batches, and asks for a log."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True

    def on_substep_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        ids = torch.arange(2, 22)[None]
        model.eval()(input_ids=ids)
        with torch.no_grad():
            model.train()(input_ids=ids)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
