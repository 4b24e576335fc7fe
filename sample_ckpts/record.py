"""Run the sample checkpoints on held-out text and collect what their routers saw and chose.

    python sample_ckpts/record.py

Every checkpoint reads the same 64 documents of 64 bytes, one document at a time, in float32 with
the weights as stored. `run_model` returns arrays; `main` writes them as recordings.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Excerpt, corpus_facts, draw_excerpts, load_corpus
from moegeom.tokens.writer import RecordingWriter
from numpy.typing import NDArray
from routers import listen
from transformers import AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import TokenColumns
from moegeom.router.load import load_routers

HERE = Path(__file__).parent
NUM_THREADS = 2
DOCUMENT_LENGTH = 64
DOCUMENTS_PER_DOMAIN = 16
DOCUMENT_SEED = 2


@dataclass(frozen=True)
class RoutedText:
    """One checkpoint on the held-out documents; row t of every array is the same token.

    `inputs` and `chosen` have one entry per router, named "text/<layer>".
    """

    inputs: dict[str, NDArray[np.float32]]  # [tokens, hidden], exactly what the router was given
    chosen: dict[str, NDArray[np.int32]]  # [tokens, top_k], in the order the model chose them
    token_id: NDArray[np.int32]  # [tokens]
    document: NDArray[np.int32]  # [tokens]
    position: NDArray[np.int32]  # [tokens], within the document
    domain: tuple[str, ...]  # one per token


@torch.no_grad()
def run_model(path: Path, documents: tuple[Excerpt, ...]) -> RoutedText:
    """Load the checkpoint at `path` and run it on each document by itself."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with listen(model, keep_inputs=True) as traces:
        for document in documents:
            model(input_ids=torch.tensor([list(document.data)]), use_cache=False)
    lengths = [len(document.data) for document in documents]
    domains = [document.domain for document in documents]
    return RoutedText(
        inputs={f"text/{layer}": torch.cat(t.inputs).numpy() for layer, t in traces.items()},
        chosen={
            f"text/{layer}": torch.cat(t.chosen).numpy().astype(np.int32)
            for layer, t in traces.items()
        },
        token_id=np.frombuffer(b"".join(d.data for d in documents), np.uint8).astype(np.int32),
        document=np.repeat(np.arange(len(documents), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        domain=tuple(np.repeat(domains, lengths).tolist()),
    )


def load_documents(*, any_corpus: bool = False) -> tuple[Excerpt, ...]:
    """The documents that all checkpoints read, domains taking turns.

    With other text than the training had, "held out" would not be known to be true; so the SHA-256
    in `corpus.json` must agree unless `any_corpus` is set.
    """
    corpus = load_corpus()
    trained_on = json.loads((HERE / "corpus.json").read_text(encoding="utf-8"))
    if not any_corpus and corpus_facts(corpus)["domains"] != trained_on["domains"]:
        raise SystemExit(
            "the text on this machine is not the text of corpus.json: train again, or pass "
            "--any-corpus to record documents that the checkpoints may have been trained on"
        )
    return draw_excerpts(
        corpus, length=DOCUMENT_LENGTH, per_domain=DOCUMENTS_PER_DOMAIN, seed=DOCUMENT_SEED
    )


def step_of(path: Path) -> int:
    """The training step in a directory name such as step_300."""
    return int(path.name.removeprefix("step_"))


def checkpoint_paths() -> list[Path]:
    """Every stored checkpoint, by model and then by training step."""
    return sorted(HERE.glob("*/step_*"), key=lambda path: (path.parent.name, step_of(path)))


def write_recording(path: Path, routed: RoutedText, *, replace: bool) -> Path:
    """Store what the routers of checkpoint `path` read and chose; returns <model>/rec/<step>."""
    out = path.parent / "rec" / path.name
    if replace and out.exists():
        shutil.rmtree(out)
    out.parent.mkdir(exist_ok=True)
    domains = tuple(dict.fromkeys(routed.domain))
    columns = TokenColumns(
        document=routed.document.astype(np.int64),
        position=routed.position,
        token_id=routed.token_id,
        domain=np.array([domains.index(name) for name in routed.domain], dtype=np.int16),
    )
    with RecordingWriter(
        out,
        "router_input",
        tuple(routed.inputs),
        checkpoint_name=f"{path.parent.name}/{path.name}",
        fingerprint=load_routers(open_checkpoint(path)).fingerprint,
        engine=f"transformers {transformers_version}, float32, eager",
        domains=domains,
    ) as writer:
        writer.append(columns, routed.inputs, chosen=routed.chosen)
    return out


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--any-corpus", action="store_true", help="accept other text")
    parser.add_argument("--replace", action="store_true", help="replace recordings that exist")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(NUM_THREADS)
    transformers_logging.disable_progress_bar()
    documents = load_documents(any_corpus=arguments.any_corpus)
    for path in checkpoint_paths():
        routed = run_model(path, documents)
        recording = write_recording(path, routed, replace=arguments.replace)
        print(f"{recording.relative_to(HERE)}: {len(routed.inputs)} routers")


if __name__ == "__main__":
    main()
