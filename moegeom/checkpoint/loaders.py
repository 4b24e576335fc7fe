"""Which files of a folder a loader takes, and which of them counts: rules as data.

Read from the sources of transformers 5.23 (``modeling_utils``, ``distributed.checkpoint``,
``integrations.peft``, ``configuration_utils``), of the default loaders of vLLM and SGLang, and of
llama.cpp's ``convert_hf_to_gguf``. Of a tensor that several files hold all of them keep the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moegeom.checkpoint.reading import Folder
from moegeom.checkpoint.shards import CONFIGS, parse_index, read_config
from moegeom.checkpoint.store import is_inside
from moegeom.core.documents import value_at
from moegeom.core.errors import CheckpointError
from moegeom.core.text import natural

_INDEX = "model.safetensors.index.json"

#: The key of config.json by which a checkpoint names its file of weights to transformers.
NAMED = "transformers_weights"


@dataclass(frozen=True)
class LoadStep:
    """Files that a loader takes where they are there; else it goes on to its next step.

    ``pattern`` matches names of files, ``index`` is the json whose files are taken: those of them
    that match, where there is a pattern too, and all that match where there is no index. ``sign``
    must match a file as well, and ``alone`` are all that may match. ``without`` are no weights.
    """

    pattern: str = ""
    index: str = ""
    sign: str = ""
    alone: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    config: str = "config.json"


@dataclass(frozen=True)
class Loader:
    """A loader with the option of its user that makes it go these steps; empty by default.

    ``inner`` are tables of the config of which it lays the first that is there over the rest.
    """

    name: str
    steps: tuple[LoadStep, ...]
    option: str = ""
    inner: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.name} ({self.option})" if self.option else self.name


_PICKLES = (LoadStep("pytorch_model.bin"), LoadStep(index="pytorch_model.bin.index.json"))
_NO_WEIGHTS = ("*training_args.bin", "*optimizer.bin", "*optimizer.pt", "*scheduler.pt")
_MISTRAL = "consolidated.safetensors.index.json"

#: Tensors of an adapter are named for no parameter of a model: engines ignore or refuse them.
_ADAPTER = ("adapter_model*.safetensors",)
_HF_GLOBS = (
    LoadStep("*.safetensors", _INDEX, without=_ADAPTER),
    LoadStep("*.bin", without=_NO_WEIGHTS),
    LoadStep("*.pt", without=(*_NO_WEIGHTS, "*scaler.pt")),
)

#: The first that takes anything of a folder is the one whose answer is judged.
LOADERS = (
    Loader(
        "transformers",
        (
            LoadStep("*.safetensors", sign="shard-?????-model-?????-of-?????.safetensors"),
            LoadStep(index=NAMED),
            LoadStep("model.safetensors"),
            LoadStep(index=_INDEX),
            *_PICKLES,
        ),
    ),
    Loader(
        "vLLM",
        (
            LoadStep("consolidated*.safetensors", _MISTRAL, config="params.json"),
            LoadStep("consolidated*.safetensors", _MISTRAL),
            _HF_GLOBS[0],
            LoadStep(index=_INDEX),  # files in folders
            *_HF_GLOBS[1:],
        ),
    ),
    Loader(
        "SGLang",
        (
            LoadStep("model.safetensors", alone=("consolidated.safetensors", "model.safetensors")),
            *_HF_GLOBS,
        ),
    ),
    Loader(
        "llama.cpp's converter",
        (LoadStep("model*.safetensors"), LoadStep("pytorch_model*.bin")),
        inner=("thinker_config.text_config", "lm_config", "llm_config", "text_config"),
    ),
    Loader("transformers", _PICKLES, "use_safetensors=False"),
)


@dataclass(frozen=True)
class LoadedFiles:
    """The files that a loader takes, in its order: of a tensor in several the last one counts.

    ``index`` is the json by which it came to them, ``config`` the file that describes the model,
    ``inner`` the table of it that counts before the rest.
    """

    loader: str
    files: tuple[str, ...]
    index: str = ""
    config: str = "config.json"
    inner: str = ""
    is_default: bool = True

    @property
    def entry(self) -> str:
        """The one file or index that stands for the answer; empty for several files."""
        return self.index or (self.files[0] if len(self.files) == 1 else "")


def answers_of(folder: Folder) -> Iterator[LoadedFiles]:
    """What each loader takes of a folder, in the order of ``LOADERS``; nothing without a config.

    Raises
    ------
    CheckpointError
        Where the config names a file of weights that no loader would take.
    """
    names = folder.files()
    configs = [name for name in CONFIGS if name in names and folder.has(name)]
    if not configs:
        return
    for loader in (*LOADERS, *_variants(names)):
        for step in loader.steps:
            if step.config in configs and (taken := _taken(step, folder, names)):
                inner = _inner(loader, folder, step.config)
                yield LoadedFiles(loader.text, *taken, step.config, inner, not loader.option)
                break


_VARIANT = re.compile(r"model\.safetensors\.index\.(.+)\.json|model\.(.+)\.safetensors", re.ASCII)


def _variants(names: Sequence[str]) -> Iterator[Loader]:
    """Transformers with each variant of which there are weights."""
    matches = filter(None, map(_VARIANT.fullmatch, names))
    for word in sorted({match[1] or match[2] for match in matches}):
        steps = (
            LoadStep(f"model.{word}.safetensors"),
            LoadStep(index=f"model.safetensors.index.{word}.json"),
        )
        yield Loader("transformers", steps, f"variant={word!r}")


def _inner(loader: Loader, folder: Folder, config: str) -> str:
    """The table that a loader lays over the rest; a config is read for one that has any alone."""
    tables = ((path, value_at(read_config(folder, config), path)) for path in loader.inner)
    return next((path for path, table in tables if table and isinstance(table, Mapping)), "")


def _taken(
    step: LoadStep, folder: Folder, names: Sequence[str]
) -> tuple[tuple[str, ...], str] | None:
    """The files of a step, and its index; None where it does not apply."""
    if step.sign and not any(fnmatchcase(name, step.sign) for name in names):
        return None
    index = _named(folder) if step.index == NAMED else step.index
    if not step.pattern:
        if not index or not folder.has(index):
            return None
        if not index.endswith(".index.json"):
            return (index,), ""
        return tuple(sorted(set(parse_index(folder, index).values()))), index
    files = [name for name in names if _matches(name, step)]
    if step.alone and set(step.alone) != {n for n in names if n.endswith(".safetensors")}:
        return None
    if index in names and files:
        listed = set(parse_index(folder, index).values())
        files = [name for name in files if name in listed]
    return (tuple(sorted(files, key=natural)), "") if files else None


def _matches(name: str, step: LoadStep) -> bool:
    is_weights = not any(fnmatchcase(name, pattern) for pattern in step.without)
    return is_weights and not name.startswith(".") and fnmatchcase(name, step.pattern)


def _named(folder: Folder) -> str:
    """The file of weights that the config names to transformers; empty where it names none."""
    config = read_config(folder, "config.json")
    parts = ((key, value) for key, value in config.items() if isinstance(value, dict))
    if inner := [key for key, part in parts if NAMED in part]:
        raise CheckpointError(
            f"config.json: {inner[0][:100]!r} has a {NAMED!r} of its own, which counts for some "
            "classes of transformers alone.",
            f"Name one file for all of them: {NAMED!r} at the top, or nowhere.",
        )
    name = config.get(NAMED)
    if name is None:
        return ""
    ends = (".safetensors", ".safetensors.index.json")
    if not isinstance(name, str) or not name.endswith(ends) or not is_inside(name):
        raise CheckpointError(
            f"config.json: {NAMED!r} is {str(name)[:100]!r}; expected a safetensors file, or an "
            "index of such files, in the folder.",
            "transformers refuses it: remove the key, or name the file to load.",
        )
    if not folder.has(name):
        raise CheckpointError(
            f"config.json: {NAMED!r} names {name[:100]!r}, which does not exist.",
            "transformers loads nothing else: remove the key, or add the file.",
        )
    return name


def own_code(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules of ``auto_map``, which transformers runs in place of its own where it is told to
    trust the checkpoint; empty without any.
    """
    entries = config.get("auto_map")
    values = entries.values() if isinstance(entries, dict) else ()
    listed = (v for value in values for v in (value if isinstance(value, list) else [value]))
    return tuple(sorted({str(v).split("--")[-1].split(".")[0] for v in listed if v}))
