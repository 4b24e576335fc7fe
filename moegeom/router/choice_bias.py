"""Biases of the choice that a family does not know: a rule without them is another rule."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from moegeom.checkpoint.dtypes import PLAIN_FLOATS
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.errors import RouterError
from moegeom.router.family import StackSpec, TensorName
from moegeom.router.integrity import STORAGE_UNKNOWN
from moegeom.router.match import Match

#: Names of tensors that are added to scores before experts are chosen.
_SOUNDS_LIKE = re.compile(
    r"(?:^|[._])(?:experts?_|(?:correction|routing|router|scores?|selection|balanc(?:e|ing))[._])"
    r"bias(?:_E)?$|(?:^|\.)exp_probs_b(?:\.bias)?$"
)

_ONE_OF_MANY = re.compile(r"(?:^|\.)experts?\.[0-9]")
_NUMBER = re.compile(r"(?<![^._])[0-9]+(?=\.)")


def sounds_like_choice_bias(name: str) -> bool:
    """True for a name such as ``...e_score_correction_bias`` or ``...expert_bias``."""
    return bool(_SOUNDS_LIKE.search(name)) and not _ONE_OF_MANY.search(name)


def has_one_number_for_each(info: TensorInfo, num_experts: int) -> bool:
    """True for plain floats, as many as there are experts, in rows if there is more than one."""
    is_vector = 1 <= len(info.shape) <= 2 and info.shape[-1] == num_experts
    return is_vector and info.dtype in PLAIN_FLOATS


def name_regex(name: str) -> str:
    """A regular expression for a name in every layer: its first number stands in a group."""
    first, *others = [re.escape(part) for part in _NUMBER.split(name)]
    return first + "".join(("([0-9]+)" if i == 0 else "[0-9]+") + p for i, p in enumerate(others))


def check_choice_biases(
    store: TensorStore, matches: Sequence[Match], experts: Sequence[int]
) -> None:
    """Raise if a layer holds a bias of the choice that its family knows nothing about.

    ``experts`` are the numbers of experts of ``matches``. Only headers are read, of tensors in a
    layer with a router whose names sound like such a bias.

    Raises
    ------
    RouterError
        If there is one; how to say what it is stands in the hint.
    """
    layers: dict[str, set[int]] = {}
    family_names: set[str] = set()
    for match, num_experts in zip(matches, experts, strict=True):
        layers.setdefault(_layer_stem(match), set()).add(num_experts)
        family_names |= {*match.names(), *_spelled(match)}
    for name in store.names():
        # a substring test first: of 90 000 names a few hundred reach the regular expression
        if not ("bias" in name or "exp_probs_b" in name) or name in family_names:
            continue
        stem = next((stem for stem in _stems(name) if stem in layers), None)
        if stem is None or not sounds_like_choice_bias(name.removeprefix(stem)):
            continue
        info = store.info(name)
        if any(has_one_number_for_each(info, count) for count in layers[stem]):
            raise _not_known(info)


def _not_known(info: TensorInfo) -> RouterError:
    return RouterError(
        f"{info.file}: tensor '{info.name}' has one number for each expert and may change which "
        "are chosen, but the rule does not name it.",
        f"Say what it is: --router-pattern with --selection-bias '{name_regex(info.name)}' (or "
        "--logit-bias), or a --family FILE that names it, under beside if it changes nothing.",
        code=STORAGE_UNKNOWN,
    )


def _layer_stem(match: Match) -> str:
    """What names of the router's layer begin with, the dot included."""
    head, _, _ = match.weight.name.partition("{layer}")
    return f"{_prefix(match)}{head}{match.layer}."


def _prefix(match: Match) -> str:
    own = match.weight.name.format(layer=match.layer)
    return (match.stem + match.leaf).removesuffix(own)


def _spelled(match: Match) -> Iterator[str]:
    """Names that the family knows in the router's layer, those that the config turns off too."""
    for pattern in _patterns(match.spec):
        yield _prefix(match) + pattern.name.format(layer=match.layer)


def _patterns(spec: StackSpec) -> Iterable[TensorName]:
    return (*spec.selection_bias, *spec.logit_bias, *spec.beside, *spec.weights.expert_scale)


def _stems(name: str) -> Collection[str]:
    """Every part of a name that ends with a dot."""
    return [name[: dot.end()] for dot in re.finditer(r"\.", name)]
