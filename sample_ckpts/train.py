"""Train the sample checkpoints from scratch, on a CPU, in a few minutes per model.

    python sample_ckpts/train.py                        # all of them, into sample_ckpts/
    python sample_ckpts/train.py --only olmoe-balanced
    python sample_ckpts/train.py --steps 20             # a quick trial, into a new directory

The text is described in `corpus.py`, the models in `recipes.py`. Everything follows from fixed
seeds; on another machine the text and the rounding differ, and so do the weights.
"""

import argparse
import copy
import csv
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Domain, Excerpt, corpus_facts, draw_excerpts, load_corpus
from recipes import RECIPES, Recipe, build_model
from routers import Load, RouterTrace, listen, measure_load, router_layers
from schedule import warmup_then_cosine
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).parent
NUM_THREADS = 1  # more would gain little, and would sum in another order
SEQUENCE_LENGTH = 128
SEQUENCES_PER_DOMAIN = 4  # in a batch
LOG_EVERY = 25
HELD_OUT_PER_DOMAIN = 16
HELD_OUT_SEED = 1
NATS_PER_BIT = math.log(2.0)


# --------------------------------------------------------------------------------------- data


def iter_batches(corpus: tuple[Domain, ...], seed: int) -> Iterator[Tensor]:
    """Endless batches [sequences, positions]: as many sequences from each domain."""
    generator = torch.Generator().manual_seed(seed)
    texts = [to_tokens(domain.training) for domain in corpus]
    positions = torch.arange(SEQUENCE_LENGTH)
    while True:
        windows = []
        for text in texts:
            last = len(text) - SEQUENCE_LENGTH
            starts = torch.randint(last + 1, (SEQUENCES_PER_DOMAIN, 1), generator=generator)
            windows.append(text[starts + positions])
        yield torch.cat(windows)


def held_out_batch(excerpts: Iterable[Excerpt]) -> Tensor:
    """Excerpts of one length as a batch [sequences, positions]."""
    return torch.stack([to_tokens(excerpt.data) for excerpt in excerpts])


def to_tokens(data: bytes) -> Tensor:
    """A token is a byte."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


# -------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Evaluation:
    """A model on the held-out excerpts."""

    bits_per_byte: float
    loads: dict[int, Load]  # by layer


@torch.no_grad()
def evaluate(model: PreTrainedModel, tokens: Tensor) -> Evaluation:
    """Loss and load on held-out text, without training."""
    model.eval()
    with listen(model) as traces:
        loss = next_byte_loss(model(input_ids=tokens, use_cache=False).logits, tokens)
    model.train()
    loads = {layer: measure_load(trace.counts()) for layer, trace in traces.items()}
    return Evaluation(loss.item() / NATS_PER_BIT, loads)


def next_byte_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def log_row(
    model: PreTrainedModel, step: int, learning_rate: float, train_loss: float, tokens: Tensor
) -> dict[str, str]:
    """One line of `log.csv`."""
    evaluation = evaluate(model, tokens)
    row = {
        "step": f"{step}",
        "learning_rate": f"{learning_rate:.3g}",
        "train_bits_per_byte": f"{train_loss / NATS_PER_BIT:.4f}",
        "held_out_bits_per_byte": f"{evaluation.bits_per_byte:.4f}",
    }
    for layer, load in evaluation.loads.items():
        row[f"max_load_over_fair_layer_{layer}"] = f"{load.max_over_fair:.3f}"
        row[f"num_starved_layer_{layer}"] = f"{load.num_starved}"
        row[f"num_dead_layer_{layer}"] = f"{load.num_dead}"
    for layer, bias in selection_biases(model).items():
        row[f"selection_bias_range_layer_{layer}"] = f"{(bias.max() - bias.min()).item():.4f}"
    return row


# ------------------------------------------------------------------------------------ training


def train(recipe: Recipe, corpus: tuple[Domain, ...], steps: int, out: Path) -> None:
    """Train one model; write its checkpoints and its log under `out`."""
    model = build_model(recipe)
    optimizer = make_optimizer(model, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps))
    kept = kept_steps(recipe, steps)
    held_out = held_out_batch(
        draw_excerpts(
            corpus, length=SEQUENCE_LENGTH, per_domain=HELD_OUT_PER_DOMAIN, seed=HELD_OUT_SEED
        )
    )

    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    recent_losses: list[float] = []
    for step, tokens in enumerate(iter_batches(corpus, recipe.seed), start=1):
        recent_losses.append(train_step(model, optimizer, tokens, recipe, step / steps))
        schedule.step()
        if step % LOG_EVERY == 0 or step in (1, steps):
            train_loss = sum(recent_losses) / len(recent_losses)
            learning_rate = float(schedule.get_last_lr()[0])
            rows.append(log_row(model, step, learning_rate, train_loss, held_out))
            recent_losses.clear()
            print(recipe.name, *(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        if step in kept:
            is_sharded = kept[step] == recipe.sharded_step
            save_checkpoint(model, out / f"step_{step}", "250KB" if is_sharded else "1GB")
        if step == steps:
            break
    write_csv(out / "log.csv", rows)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    recipe: Recipe,
    progress: float,
) -> float:
    """One optimizer step. Returns the cross-entropy in nats, without the balancing loss."""
    with listen(model) as traces:
        output = model(input_ids=tokens, use_cache=False)
    loss = next_byte_loss(output.logits, tokens)
    total = loss
    if model.config.output_router_logits:
        balancing = load_balancing_loss(model, output.router_logits)
        total = loss + model.config.router_aux_loss_coef * balancing
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if recipe.bias_rate > 0:
        # The rate falls to zero like the learning rate, so that the biases come to rest.
        balance_biases(model, traces, recipe.bias_rate * 0.5 * (1 + math.cos(math.pi * progress)))
    return loss.item()


def load_balancing_loss(model: PreTrainedModel, router_logits: tuple[Tensor, ...]) -> Tensor:
    """The Switch Transformer loss of each layer, averaged over layers; top_k when all is even.

    The model's own `aux_loss` counts the slots of all layers together, so that layers may be
    uneven as long as they are uneven in opposite ways. Here each layer is balanced by itself.
    """
    config = model.config
    losses = [
        load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
        for logits in router_logits
    ]
    return torch.as_tensor(sum(losses) / len(losses))


@torch.no_grad()
def balance_biases(model: PreTrainedModel, traces: dict[int, RouterTrace], rate: float) -> None:
    """Loss-free balancing: raise the selection bias of idle experts, lower that of busy ones."""
    for layer, bias in selection_biases(model).items():
        load = traces[layer].counts().float()
        bias += rate * torch.sign(load.mean() - load)


def selection_biases(model: PreTrainedModel) -> dict[int, Tensor]:
    """Layer -> selection bias [experts], for routers that have one."""
    return {
        layer: router.e_score_correction_bias
        for layer, router in router_layers(model).items()
        if isinstance(router, DeepseekV3TopkRouter)
    }


def make_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with a group of its own for the routers, and no decay for norm gains."""
    router_weights = [router.weight for router in router_layers(model).values()]
    is_router = {id(weight) for weight in router_weights}
    others = [weight for weight in model.parameters() if id(weight) not in is_router]
    return torch.optim.AdamW(
        [
            {
                "params": [weight for weight in others if weight.ndim > 1],
                "lr": recipe.learning_rate,
                "weight_decay": recipe.weight_decay,
            },
            {
                "params": [weight for weight in others if weight.ndim == 1],
                "lr": recipe.learning_rate,
                "weight_decay": 0.0,
            },
            {
                "params": router_weights,
                "lr": recipe.router_learning_rate,
                "weight_decay": recipe.router_weight_decay,
            },
        ],
        betas=(0.9, recipe.beta2),
        fused=True,
    )


# -------------------------------------------------------------------------------------- output


def kept_steps(recipe: Recipe, steps: int) -> dict[int, int]:
    """Step to keep in a training of `steps` steps -> the recipe's step that it stands for."""
    scale = steps / recipe.num_steps
    return {max(1, round(step * scale)): step for step in recipe.kept_steps}


def save_checkpoint(model: PreTrainedModel, path: Path, max_shard_size: str) -> None:
    """Store as real checkpoints are: weights in bfloat16, the selection bias in float32.

    The bias is a buffer, not a parameter, so converting the parameters leaves it as it is.
    """
    stored = copy.deepcopy(model)
    for parameter in stored.parameters():
        parameter.data = parameter.data.bfloat16()
    shutil.rmtree(path, ignore_errors=True)
    stored.save_pretrained(path, max_shard_size=max_shard_size)
    # Says nothing: these models have no special tokens and no sampling settings.
    (path / "generation_config.json").unlink(missing_ok=True)


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    """Rows with the same keys, as a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the sample checkpoints from scratch.")
    parser.add_argument("--only", choices=sorted(RECIPES), help="train this model only")
    parser.add_argument("--steps", type=int, help="train for N steps instead of the recipe's")
    parser.add_argument("--out", type=Path, help="where to write (default: sample_ckpts)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # A shortened training must not replace the stored checkpoints by accident.
    default_out = (
        HERE if arguments.steps is None else Path(tempfile.mkdtemp(prefix="sample_ckpts-"))
    )
    out = arguments.out or default_out
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, and slow
    # Bytes that never occur and dead experts leave denormal numbers in AdamW, which are slow.
    torch.set_flush_denormal(True)
    transformers_logging.disable_progress_bar()

    corpus = load_corpus()
    out.mkdir(parents=True, exist_ok=True)
    facts = json.dumps(corpus_facts(corpus), indent=2)
    (out / "corpus.json").write_text(facts + "\n", encoding="utf-8")
    recipes = [RECIPES[arguments.only]] if arguments.only else list(RECIPES.values())
    for recipe in recipes:
        train(recipe, corpus, arguments.steps or recipe.num_steps, out / recipe.name)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
