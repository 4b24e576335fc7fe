"""What README.md shows: the picture of the loss curves, and the table of the stored checkpoints.

    python sample_ckpts/summary.py        # draws loss.svg, prints the tables

The figures of the table are measured on the checkpoints as stored (bfloat16 weights), on the
documents of `record.py`.
"""

import csv
import json
import math
from pathlib import Path

import matplotlib as mpl
import torch
from corpus import Domain, load_corpus
from matplotlib.figure import Figure
from record import checkpoint_paths, load_documents
from routers import listen, measure_load
from train import NATS_PER_BIT, NUM_THREADS, held_out_batch, next_byte_loss
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).parent
MODELS = ("olmoe-balanced", "olmoe-collapsed", "deepseek-tiny")
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by colour-blind readers too


def read_log(model: str) -> dict[str, list[float]]:
    """Columns of a model's `log.csv`."""
    with (HERE / model / "log.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows] for key in rows[0]}


def draw_loss(path: Path, unigram_bits: float) -> None:
    """Loss of the three models, and the load of their busiest expert, against the step."""
    # Fixed salt and no date: the same logs give the same file.
    mpl.rcParams["svg.hashsalt"] = "moegeom"
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    loss_axes, load_axes = figure.subplots(1, 2)
    for model, colour in zip(MODELS, COLOURS, strict=True):
        log = read_log(model)
        steps = log["step"]
        loss_axes.plot(steps, log["train_bits_per_byte"], color=colour, linewidth=0.8, alpha=0.6)
        loss_axes.plot(steps, log["held_out_bits_per_byte"], color=colour, label=model)
        load_axes.plot(steps, busiest_load(log), color=colour, label=model)
    loss_axes.axhline(unigram_bits, color="grey", linestyle=":", label="unigram entropy")
    load_axes.axhline(1.0, color="grey", linestyle=":", label="even load")
    loss_axes.set_title("loss: held-out (thick), training (thin)", fontsize=10)
    loss_axes.set_ylabel("bits per byte")
    load_axes.set_title("busiest expert of the worst layer, held-out", fontsize=10)
    load_axes.set_ylabel("load / fair share")
    for axes in (loss_axes, load_axes):
        axes.set_xlabel("training step")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def busiest_load(log: dict[str, list[float]]) -> list[float]:
    """Largest load over fair share among the layers, for every logged step."""
    layers = [column for key, column in log.items() if key.startswith("max_load_over_fair")]
    return [max(values) for values in zip(*layers, strict=True)]


def unigram_entropy_bits(corpus: tuple[Domain, ...]) -> float:
    """Entropy of single bytes of the training text, each domain with the same weight."""
    frequency = torch.zeros(256, dtype=torch.float64)
    for domain in corpus:
        tokens = torch.frombuffer(bytearray(domain.training), dtype=torch.uint8).long()
        frequency += torch.bincount(tokens, minlength=256) / (len(tokens) * len(corpus))
    return -torch.special.xlogy(frequency, frequency).sum().item() / math.log(2.0)


@torch.no_grad()
def render_checkpoints() -> str:
    """Markdown table of every stored checkpoint.

    "load" is the busiest expert over the fair share and "starved" the number of starved experts
    (of them dead), both layer by layer.
    """
    documents = load_documents()
    tokens = held_out_batch(documents)
    lines = ["| checkpoint | kB | bits per byte | load | starved |", "|---|---|---|---|---|"]
    for path in checkpoint_paths():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with listen(model) as traces:
            loss = next_byte_loss(model(input_ids=tokens, use_cache=False).logits, tokens)
        loads = [measure_load(trace.counts()) for trace in traces.values()]
        size_kb = sum(file.stat().st_size for file in path.iterdir()) / 1000
        busiest = " ".join(f"{load.max_over_fair:.2f}" for load in loads)
        starved = ", ".join(f"{load.num_starved} ({load.num_dead})" for load in loads)
        lines.append(
            f"| {path.relative_to(HERE)} | {size_kb:.0f} | {loss.item() / NATS_PER_BIT:.2f} "
            f"| {busiest} | {starved} |"
        )
    return "\n".join(lines)


def render_corpus() -> str:
    """Markdown table of `corpus.json`."""
    facts = json.loads((HERE / "corpus.json").read_text(encoding="utf-8"))
    lines = ["| domain | part | documents | bytes | SHA-256 |", "|---|---|---|---|---|"]
    for domain, parts in facts["domains"].items():
        for part, values in parts.items():
            lines.append(
                f"| {domain} | {part.replace('_', '-')} | {values['num_documents']} "
                f"| {values['size_bytes']} | `{values['sha256']}` |"
            )
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(NUM_THREADS)
    transformers_logging.disable_progress_bar()
    unigram_bits = unigram_entropy_bits(load_corpus())
    draw_loss(HERE / "loss.svg", unigram_bits)
    print(f"unigram entropy {unigram_bits:.2f} bits per byte\n")
    print(render_checkpoints(), render_corpus(), sep="\n\n")


if __name__ == "__main__":
    main()
