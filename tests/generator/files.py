"""The files of a case: checkpoints, recordings and replies as engines write them."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.tokens import Stage
from moegeom.router.load import load_routers
from tests.columns import columns_of, recording_of
from tests.generator.engine import Run
from tests.generator.model import DOMAINS, Model, RouterTensors, Text, config_of

#: What is recorded of a run: ids and weights alone, inputs or logits beside them, or the replies
#: of a server, which hold ids and no row for the last token.
Form = Literal["ids", "router_input", "logits", "replies"]


def write_checkpoint(model: Model, routers: Sequence[RouterTensors], folder: Path) -> None:
    folder.mkdir(parents=True)
    config = config_of(model.family, model.shape, model.stored)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    dtype = bfloat16 if model.stored == "bfloat16" else np.dtype(np.float32)
    tensors = {"model.embed_tokens.weight": model.embedding.astype(dtype)}
    for at, router in enumerate(routers):
        name = f"model.layers.{at}."
        tensors[f"{name}post_attention_layernorm.weight"] = router.gain.astype(dtype)
        tensors[name + model.family.router] = router.weight.astype(dtype)
        if router.bias is not None:
            tensors[name + model.family.bias] = router.bias
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_recording(run: Run, text: Text, form: Form, checkpoint: Path, path: Path) -> None:
    found = load_routers(open_checkpoint(checkpoint))
    names = tuple(router.name for router in found.routers)

    def by_router(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, arrays, strict=True))

    stages: dict[Form, tuple[Stage, Sequence[np.ndarray] | None]] = {
        "ids": ("ids", None),
        "router_input": ("router_input", run.inputs),
        "logits": ("logits", run.logits),
    }
    stage, values = stages[form]
    document = np.repeat(np.arange(len(text.lengths)), text.lengths)
    facts = {"checkpoint_name": checkpoint.name, "fingerprint": found.fingerprint}
    recording_of(
        *(path, stage, columns_of(document, text.token_id[text.is_token], text.domain[document])),
        *(None if values is None else by_router(values), by_router(run.chosen)),
        {"routing_weights": by_router(run.weights)},
        **facts,
        domains=DOMAINS,
        dtype="float32",
    )


def write_replies(run: Run, text: Text, experts: int, path: Path) -> None:
    """One reply of a server to a line; the last token of each is never routed."""
    chosen = np.stack(run.chosen, axis=1)
    dtype = np.int16 if chosen.min() < 0 else np.uint8 if experts <= 256 else np.uint16
    ends = np.cumsum(text.lengths)
    lines = []
    for document, (end, length) in enumerate(zip(ends, text.lengths, strict=True)):
        stream = io.BytesIO()
        np.save(stream, chosen[end - length : end - 1].astype(dtype))
        tokens = text.token_id[document, :length].tolist()
        prompt = 2 * len(tokens) // 3
        choice = {
            "token_ids": tokens[prompt:],
            "routed_experts": base64.b64encode(stream.getvalue()).decode(),
        }
        reply = {"id": str(document), "prompt_token_ids": tokens[:prompt], "choices": [choice]}
        lines.append(json.dumps(reply))
    path.write_text("\n".join(lines) + "\n")
