"""Routers of layers that predict further tokens (MTP) and lie in modules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moegeom.router.family import Family, LayersSpec, Setting, StackSpec, TensorName

#: ``mtp_from`` of stacks whose layers all predict further tokens.
EVERY_LAYER = Setting(value=0)


def with_mtp_modules(family: Family) -> Family:
    """The family with a stack for the MTP modules of each stack that names some.

    Their routers belong to the stack ``mtp`` and follow the same rule. None of them is expected:
    checkpoints often leave them out.
    """
    return replace(family, stacks=tuple(s for stack in family.stacks for s in _with_own(stack)))


def _with_own(stack: StackSpec) -> Iterator[StackSpec]:
    yield stack
    if stack.mtp_layers:
        yield _mtp(stack)


def _mtp(stack: StackSpec) -> StackSpec:
    def moved(patterns: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
        copies = (
            replace(pattern, name=head + pattern.name.partition("{layer}.")[2])
            for head in stack.mtp_layers
            for pattern in patterns
        )
        return tuple(dict.fromkeys(copies))

    norm, inner = stack.norm, stack.projection
    return replace(
        stack,
        weight=moved(stack.weight),
        logit_bias=moved(stack.logit_bias),
        selection_bias=moved(stack.selection_bias),
        beside=moved(stack.beside),
        token_table=moved(stack.token_table),
        norm=norm and replace(norm, weight=moved(norm.weight), bias=moved(norm.bias)),
        projection=inner
        and replace(
            inner,
            weight=moved(inner.weight),
            bias=moved(inner.bias),
            log_scale=moved(inner.log_scale),
        ),
        weights=replace(stack.weights, expert_scale=moved(stack.weights.expert_scale)),
        mtp_from=EVERY_LAYER,
        layers=LayersSpec(count=Setting(value=0)),
    )
