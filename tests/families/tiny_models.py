"""Tiny random models of every MoE family of transformers: the oracle for what a family file says.

Weights, biases and norm gains are random with a spread that matters, so that a bias left out, a
norm forgotten or a group ignored changes most choices.
"""

import dataclasses
import re
import zlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.router import RouterSet
from moegeom.router.family import Choice, Setting, family_of
from moegeom.router.load import load_routers
from tests.by_day import one_of_each
from tests.families.tiny_configs import tiny_config
from tests.families.tiny_families import FAMILIES
from tests.records import new_folder

#: Every family and variant; those with towers, which take longer to build, at the end.
NAMES = tuple(sorted(FAMILIES, key=lambda n: ("language_model" in FAMILIES[n].routers[0][1], n)))

#: Routers whose choice does not follow from their input.
LISTED = {"doge", "zaya", "zaya__skip"}

#: Routers that read the residual stream and scale it themselves: what they received is not normed.
OWN_NORM = {"gemma4", "gemma4_text", "diffusion_gemma"}

LOADED = [name for name in NAMES if name not in LISTED]

#: What a family's file says of the steps of its rule and of its experts.
STEPS = ("score", "weights", "logit_bias", "selection_bias", "groups", "norm", "num_shared")
STEPS += ("multiplier", "soft_cap", "experts", "capacity", "token_table")


def mechanism(name: str) -> Hashable:
    """How a family routes, whatever its tensors and keys are called; variants are apart."""
    if FAMILIES[name].language:
        return "around the language model of another family"
    kind, *variant = name.split("__")
    family = family_of(kind)
    stacks = family.stacks if family else ()
    return repr((variant, [[_plain(getattr(s, step)) for step in STEPS] for s in stacks] or name))


def _plain(value: Any) -> Any:
    if isinstance(value, Setting):
        return [bool(v) if f != "value" else v for f, v in vars(value).items() if f != "default"]
    if isinstance(value, Choice):
        return value.steps
    if isinstance(value, tuple):
        return sorted({tensor.layout for tensor in value})
    if dataclasses.is_dataclass(value):
        parts = vars(value).items()
        return [_plain(part) for field, part in parts if field not in {"eps", "text", "when"}]
    return value


#: All families that are loaded; by day one for each mechanism.
BY_DAY = one_of_each(LOADED, mechanism)

#: Added to the scores for the choice alone, wherever a family keeps it.
SELECTION_BIAS = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases)$")

EXPERT_SPREAD, NORM_SPREAD, WEIGHT_SPREAD, LOGIT_BIAS_SPREAD = 0.05, 0.2, 0.3, 0.5

#: Beside scores between 0 and 1: enough to change most choices, too little to make them for good.
SELECTION_BIAS_SPREAD = 0.3

#: Where the scores are nearer to each other (a softmax, scaled logits) or farther (logits).
OWN_SPREAD = {
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe", "longcat_flash", "zaya"), 0.1),
    "deepseek_v4": 0.6,
    "kolibri1": 0.8,
    "muse_spark": 0.05,
}

#: Below zero, a group that is filled with 0 instead of minus infinity would win.
SHIFT_OF_BIAS = {"deepseek_v3__negbias": -2.0}


@dataclass(frozen=True)
class Router:
    stack: str
    layer: int
    name: str
    module: torch.nn.Module


@cache
def model_of(name: str) -> Any:
    """The tiny model, built once: nobody changes it."""
    return build(name)


@cache
def saved(name: str) -> Path:
    """A folder with the tiny model in the hub's layout: nobody changes it."""
    model_of(name).save_pretrained(folder := new_folder())
    return folder


@cache
def read(name: str) -> RouterSet:
    return load_routers(open_checkpoint(saved(name)))


def build(name: str) -> transformers.PreTrainedModel:
    """The model of a family in float32, the same at every call."""
    with repeatable(name):
        model = getattr(transformers, FAMILIES[name].model)(tiny_config(name)).eval()
        _randomise(model, name)
    return model


@contextmanager
def repeatable(name: str) -> Iterator[None]:
    """Random numbers of a family alone, sums in the order of one thread, and no gradients."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(zlib.crc32(name.encode()))
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def routers_of(model: transformers.PreTrainedModel, name: str) -> Iterator[Router]:
    """The routers of a model of this family, stack by stack, in the order of their layers."""
    for stack, pattern in FAMILIES[name].routers:
        wanted = re.compile(re.escape(pattern).replace(r"\{i\}", r"(\d+)"))
        for path, module in model.named_modules():
            if found := wanted.fullmatch(path):
                yield Router(stack, int(found[1]), path, module)


def _randomise(model: transformers.PreTrainedModel, name: str) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.normal_()
        elif "Experts" in type(module).__name__:
            for matrix in module.parameters(recurse=False):
                matrix.normal_(std=EXPERT_SPREAD)  # one class of transformers leaves them unset
        elif "Norm" in type(module).__name__:
            for gain in module.parameters(recurse=False):
                _spread(gain, NORM_SPREAD)
    for router in routers_of(model, name):
        for path, parameter in router.module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=WEIGHT_SPREAD)
            else:
                _spread(parameter, LOGIT_BIAS_SPREAD if path.endswith("bias") else NORM_SPREAD)
        for path, table in router.module.named_buffers():
            if path.endswith("tid2eid"):  # token by token, distinct experts
                experts = model.config.n_routed_experts
                table.copy_(torch.rand(len(table), experts).argsort()[:, : table.shape[1]])
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if SELECTION_BIAS.search(path):
            tensor.normal_(std=OWN_SPREAD.get(name, SELECTION_BIAS_SPREAD))
            tensor += SHIFT_OF_BIAS.get(name, 0.0)
            if name == "zaya":  # every loaded model has this one: the skip class is never chosen
                tensor[-1] = -1.0


def _spread(tensor: torch.Tensor, by: float) -> None:
    tensor += by * torch.randn(tensor.shape)
