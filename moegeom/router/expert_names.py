"""Names of the tensors in the layer of a router: the layer, a module, an expert's number, a part.

``model.layers.3.mlp.experts.7.up_proj.weight_scale`` is the part ``weight_scale`` of the module
``mlp.experts.{}.up_proj`` of expert 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Names of the first matrix or matrices (gate, up) and of the last; longer names come first. A
#: single first matrix is gate and up in one where it has twice as many rows as the last columns.
SPELLINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_up_proj",), "down_proj"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w13_weight",), "w2_weight"),
    (("w1", "w3"), "w2"),
    (("w1", "v1"), "w2"),
    (("fc1", "fc3"), "fc2"),
    (("fc1",), "fc2"),
    (("wi",), "wo"),
    (("input_linear",), "output_linear"),
    (("ffn_gate_up_exps",), "ffn_down_exps"),
    (("ffn_gate_exps", "ffn_up_exps"), "ffn_down_exps"),
    (("ffn_up_exps",), "ffn_down_exps"),
)

LEAVES = sorted({n for first, last in SPELLINGS for n in (*first, last)}, key=len, reverse=True)

LAYER = re.compile(r".*?(?:layers|layer|blk|blocks|block|h)\.[0-9]+\.")

#: Experts that run for every token.
SHARED = re.compile(r"shared?_(?:experts?|mlp|w\d)|_shexp")

#: The number that shared experts are gated by.
SHARED_GATE = re.compile(r"(?:.*\.)?(?:shared_expert_gate|ffn_gate_inp_shexp)")

#: Numbers of experts have fewer digits.
EXPERT_DIGITS = 6

#: A tensor of one expert of grouped layers, behind ``experts.``: ``fc1.weight7``.
_GROUPED = re.compile(r"(?P<leaf>.+\.(?:weight|bias))(?P<number>[0-9]{1,5})")

#: A module of experts and its part, which may follow without a dot: ``gate_up_proj_scales``.
_PART = re.compile(rf"(?P<module>(?:.*\.)?(?:{'|'.join(LEAVES)}))(?P<part>(?:\..*|_[^.]*)?)")

#: Names by layer, then by what is alike in them, then by the number of the expert (-1: of all).
LayerNames = Mapping[str, Mapping[str, Mapping[int, str]]]


def layer_names(names: Iterable[str]) -> LayerNames:
    """Names of tensors by their layer ("" without one) and expert; they are plain names."""
    layers: dict[str, dict[str, dict[int, str]]] = {}
    # of a hundred thousand names most are those of experts: one look for all of a kind
    places: dict[str, dict[int, str]] = {}
    for name in names:
        alike, number = numbered(name)
        if alike not in places:
            layer = LAYER.match(alike)
            places[alike] = layers.setdefault(layer[0] if layer else "", {})[alike] = {}
        places[alike][number] = name
    return layers


def numbered(name: str) -> tuple[str, int]:
    """The name with ``{}`` for the number of an expert, and the number; -1 without one."""
    head, separator, tail = name.rpartition("experts.")
    if not separator or head.endswith(("shared_", "share_")):
        return name, -1
    number, dot, rest = tail.partition(".")
    if (
        (digits := number.removeprefix("expert_")).isdecimal()
        and dot
        and len(digits) < EXPERT_DIGITS
    ):
        return f"{head}experts.{number[: -len(digits)]}{{}}.{rest}", int(digits)
    if grouped := _GROUPED.fullmatch(tail):
        return f"{head}experts.{grouped['leaf']}{{}}", int(grouped["number"])
    return name, -1


def parted(name: str) -> tuple[str, str]:
    """A module, and what stands behind it: ``weight``; ``_scales`` or nothing without a dot."""
    if match := _PART.fullmatch(name):
        return match["module"], match["part"].removeprefix(".")
    module, _, part = name.rpartition(".")
    return module, part
