"""Router modules among the names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from moegeom.core.errors import RouterError
from moegeom.core.router import Skipped
from moegeom.router.family import Family, StackSpec
from moegeom.router.integrity import PART_MISSING, STORAGE_UNKNOWN
from moegeom.router.settings import Settings


@dataclass(frozen=True)
class Match:
    """One router found by name. ``beside``: tensors of its module that its family does not know."""

    stack: str
    layer: int
    spec: StackSpec
    prefix: str
    weight: str
    logit_bias: str | None
    selection_bias: str | None
    gain: str | None
    beside: tuple[str, ...]

    @property
    def name(self) -> str:
        slot = f"/{self.spec.slot}" if self.spec.slot else ""
        return f"{self.stack}/{self.layer}{slot}"


@dataclass(frozen=True)
class _Module:
    """Tensors under one router's path: ``stem`` is the path with its dot."""

    prefix: str
    layer: int
    stem: str
    weight: str
    leaves: tuple[str, ...]


def match_routers(
    names: Collection[str], family: Family, settings: Settings
) -> tuple[list[Match], list[Skipped]]:
    """All routers in natural order, and tensors that only look like one.

    Raises
    ------
    RouterError
        If a router is there twice, has no plain weight, or lacks a bias or norm of its family.
    """
    found: dict[str, Match] = {}
    order: dict[str, tuple[bool, int, int, int]] = {}
    skipped: list[Skipped] = []
    stacks = list(dict.fromkeys(spec.name for spec in family.stacks))
    for place, spec in enumerate(family.stacks):
        modules, others = _modules(names, spec)
        skipped += others
        mtp_from = settings.layer_count(spec.mtp_from) if spec.mtp_from and modules else None
        for module in modules:
            is_mtp = mtp_from is not None and module.layer >= mtp_from
            match = _match(module, spec, "mtp" if is_mtp else spec.name, names, family)
            if match.name in found:
                raise RouterError(
                    f"router {match.name}: is stored twice, as '{found[match.name].weight}' and "
                    f"'{match.weight}'."
                )
            found[match.name] = match
            # Slots of one layer stand next to each other.
            order[match.name] = (is_mtp, stacks.index(spec.name), match.layer, place)
    return sorted(found.values(), key=lambda m: order[m.name]), skipped


def _modules(names: Collection[str], spec: StackSpec) -> tuple[list[_Module], list[Skipped]]:
    """Modules of one stack by path, whatever tensors they hold."""
    modules: dict[tuple[str, int, str], list[str]] = {}
    doubtful: dict[str, str] = {}
    for pattern in spec.weight:
        path, _, leaf = pattern.rpartition(".")
        head, _, tail = path.partition("{layer}")
        # A substring test first: of 90 000 names a few hundred reach the regular expression.
        inner = f"{tail}."
        near = [name for name in names if inner in name]
        shape = re.compile(
            rf"(.*?){re.escape(head)}([0-9]{{1,6}}){re.escape(tail)}\.(.+)", re.DOTALL
        )
        for name in near:
            hit = shape.fullmatch(name)
            if hit is None or hit[1] not in spec.prefixes:
                if name.endswith(f"{tail}.{leaf}"):
                    doubtful.setdefault(name, _unknown_prefix(hit))
                continue
            stem = name.removesuffix(hit[3])
            modules.setdefault((hit[1], int(hit[2]), stem), []).append(name)
    leaf = spec.weight[0].rpartition(".")[2]
    # A name that one spelling turns down may be what another spelling is made for.
    taken = {name for leaves in modules.values() for name in leaves}
    skipped = [Skipped(name, why) for name, why in doubtful.items() if name not in taken]
    return [
        _Module(prefix, layer, stem, stem + leaf, tuple(leaves))
        for (prefix, layer, stem), leaves in modules.items()
    ], skipped


def _unknown_prefix(hit: re.Match[str] | None) -> str:
    if hit is None:
        return "its name has no layer number where the family has one"
    return f"'{hit[1]}' in front of its layer is no known prefix"


def _match(
    module: _Module, spec: StackSpec, stack: str, names: Collection[str], family: Family
) -> Match:
    router = f"router {stack}/{module.layer}"
    if module.weight not in module.leaves:
        raise RouterError(
            f"{router}: there is no tensor '{module.weight}', only '{module.leaves[0]}'"
            f"{' ...' if len(module.leaves) > 1 else ''}.",
            "Routers in packed or quantised storage are not decoded yet; use the original weights.",
            code=STORAGE_UNKNOWN,
        )

    def find(patterns: tuple[str, ...], what: str) -> str | None:
        spelled = [module.prefix + p.format(layer=module.layer) for p in patterns]
        hits = [name for name in spelled if name in names]
        if patterns and not hits:
            raise RouterError(
                f"{router}: tensor '{spelled[0]}' is missing; "
                f"routers of family {family.name} have a {what}.",
                code=PART_MISSING,
            )
        return hits[0] if hits else None

    logit_bias = find(spec.logit_bias, "logit bias")
    selection_bias = find(spec.selection_bias, "selection bias")
    gain = find(spec.norm.weight if spec.norm else (), "norm in front")
    known = {module.weight, logit_bias, selection_bias}
    beside = tuple(sorted(n for n in module.leaves if n not in known))
    return Match(
        stack, module.layer, spec, module.prefix, module.weight, logit_bias, selection_bias, gain,
        beside,
    )  # fmt: skip
