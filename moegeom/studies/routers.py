"""``moegeom list routers``: which routers a checkpoint has, with rule, shape and storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moegeom.checkpoint.store import TensorStore
from moegeom.core.digest import digits_of
from moegeom.core.router import Router, RouterSet, format_layers
from moegeom.core.text import number_of
from moegeom.document.header import size
from moegeom.document.model import Block, Document, Fact, Note, Table, Title, View
from moegeom.document.place import layers_without_router
from moegeom.document.rule_words import assumed, rule_brief
from moegeom.engine.request import ModelTerms
from moegeom.engine.run_facts import router_facts
from moegeom.router.expert_names import SHARED, SHARED_GATE
from moegeom.router.inventory import is_of_experts
from moegeom.router.load import load_routers
from moegeom.router.rule import (
    describe_router,
    describe_routers,
    name_patterns,
    rule_in_words,
    rule_origin,
)
from moegeom.studies.changes.record import where

#: Facts of a router that are columns; the first says which router it is.
_COLUMNS = ("router", "experts", "top_k", "hidden", "stored", "boundaries", "selection")

#: Columns of the label in front of a fact.
_LABEL = 12


def routers(store: TensorStore, terms: ModelTerms) -> RouterSet:
    """The routers of the layers asked for, with a note on layers that have none.

    Raises
    ------
    RouterError
        When there is none, or one that cannot be interpreted.
    """
    model = load_routers(store, terms.layers, terms.requested_family)
    absent = layers_without_router(terms.layers, (router.name for router in model.routers))
    return replace(model, notes=(*model.notes, absent)) if absent else model


def document(model: RouterSet, view: View) -> Document:
    """What ``moegeom list routers`` says."""
    del view
    rows = _alike(model.routers)
    table = Table(
        [_COLUMNS],
        rows,
        left=[_COLUMNS.index(name) for name in ("router", "stored", "boundaries", "selection")],
        paragraphs=[(row[0], _sentence(row)) for row in rows],
    )
    ending = [f"note: {note}" for note in model.notes]
    ending += [f"skipped {skipped.tensor}: {skipped.reason}" for skipped in model.skipped]
    return Document(
        "routers",
        model.checkpoint,
        [[*_header(model)], [table], [Note(text, "plain") for text in ending]],
        lambda: describe_routers(model),
    )


def _header(model: RouterSet) -> Iterator[Block]:
    brief = rule_brief(model.family_text, [router_facts(router) for router in model.routers])
    yield Title(model.checkpoint, f"{model.family}: {brief}.")
    expected = "" if model.num_expected is None else f" ({model.num_expected} expected)"
    num_rows = sum(router.num_experts for router in model.routers)
    yield _fact(
        "routers",
        f"{number_of(len(model.routers), 'router')}{expected} with "
        f"{number_of(num_rows, 'expert')}. Read {size(model.bytes_read)} of "
        f"{size(model.bytes_total)}.",
    )
    yield _fact("fingerprint", digits_of(model.fingerprint))
    if model.revision:
        yield _fact("revision", model.revision)
    how = "a recording with the model's own choices verifies it"
    yield _fact("rule", f"{assumed(rule_origin(model.family))}: {how}.")
    rules = Counter(rule_in_words(router) for router in model.routers)
    for label, parts in (("named", name_patterns(model)), ("routes", rules)):
        for part, count in parts.items():
            of = f" ({count} of {len(model.routers)})" if len(parts) > 1 else ""
            yield _fact(label, f"{part}{of}")
    yield _fact("blocks", block_text(model))


#: Kinds of blocks that are told before the rest is counted.
_MOST_BLOCKS = 2


def block_text(model: RouterSet) -> str:
    """What stands behind the routers, by layers that hold the same: ``experts 0-63``."""
    facts = model.claims["blocks"]
    if not facts["has_experts"]:
        return "no experts in the file."
    kinds: dict[str, list[str]] = {}
    for part in facts["parts"]:
        kinds.setdefault(_parts_text(part["modules"]), []).extend(part["routers"])
    every = [name for names in kinds.values() for name in names]
    texts = [f"{text} in {where(names, every)}" for text, names in kinds.items()]
    texts = texts if len(texts) > 1 else list(kinds)
    more, flaws = len(texts) - _MOST_BLOCKS, len(facts["flaws"])
    text = "; ".join([*texts[:_MOST_BLOCKS], *[f"{more} kinds more"] * (more > 0)])
    return f"{text}. {number_of(flaws, 'flaw')}: moegeom check." if flaws else f"{text}."


def _parts_text(modules: Mapping[str, str]) -> str:
    """The experts of a block by number, and what stands beside them."""
    parts: list[str] = []
    for module, experts in modules.items():
        if SHARED_GATE.fullmatch(module):
            parts.append("gate of shared experts")
        elif SHARED.search(module):
            parts.append("shared experts")
        elif is_of_experts(module):
            parts.append(f"experts {experts}" if experts else "experts in one tensor")
        else:
            parts.append(module)
    return ", ".join(dict.fromkeys(parts)) or "nothing"


def _fact(label: str, text: str) -> Fact:
    return Fact(label, text, indent=_LABEL)


def _sentence(row: Sequence[str]) -> str:
    return ", ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS[1:], row[1:], strict=True))


def _alike(routers: Sequence[Router]) -> list[tuple[str, ...]]:
    """One line for all routers of a stack with equal facts: ``text/0-47``."""
    layers: dict[tuple[tuple[str, ...], tuple[str, ...]], set[int]] = {}
    for router in routers:
        stack, layer, *slot = router.name.split("/")
        layers.setdefault(((stack, *slot), _cells(describe_router(router))), set()).add(int(layer))
    return [
        ("/".join([stack, format_layers(those), *slot]), *cells)
        for ((stack, *slot), cells), those in layers.items()
    ]


def _cells(facts: Mapping[str, object]) -> tuple[str, ...]:
    cells = dict(facts)
    if not facts["finite"]:
        cells["selection"] = f"{facts['selection']}, NOT FINITE"
    return tuple(str(cells[name]) for name in _COLUMNS[1:])
