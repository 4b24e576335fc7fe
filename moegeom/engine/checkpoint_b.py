"""The routers of a second checkpoint, made to read the recorded inputs of the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moegeom.checkpoint.open import open_checkpoint
from moegeom.core.errors import RouterError, RouterRuleError, UsageError
from moegeom.core.router import Router, RouterSet
from moegeom.core.text import number_of
from moegeom.core.tokens import TokenSource
from moegeom.engine.prepared import refuse_non_finite_rows
from moegeom.engine.request import ScanRequest
from moegeom.router.load import load_routers
from moegeom.tokens.recording.facts import FACTS_FILE
from moegeom.tokens.traces.source import CountedSource

#: What has to agree for two routers to choose for the same inputs.
_SIZES: Mapping[str, Callable[[Router], int]] = {
    "experts": lambda router: router.num_experts,
    "coordinates of the input": lambda router: router.hidden_size,
    "chosen experts": lambda router: router.rule.top_k,
}

#: Arrays that decide a choice, besides the rule.
_DECIDING = ("weight", "logit_bias", "selection_bias", "gain", "norm_bias")

_OTHER_LAYERS = "--layers compares the layers that both checkpoints have."


@dataclass(frozen=True, eq=False)
class CheckpointB:
    """A second checkpoint; ``routers`` by name, with rows for the inputs of the first.

    ``equal`` names those that are the same in both, bit for bit; ``regained`` those whose rows were
    scaled because the gain in front of them is another one, and ``unknown_gain`` those of which
    the gain in front is known in one checkpoint only, taken as equal.
    """

    checkpoint: RouterSet
    routers: Mapping[str, Router]
    equal: tuple[str, ...]
    regained: tuple[str, ...]
    unknown_gain: tuple[str, ...]
    has_same_rule: bool


def open_checkpoint_b(
    request: ScanRequest, source: TokenSource | None, routers: Sequence[Router]
) -> CheckpointB | None:
    """The second checkpoint, beside the recorded ones of ``routers``; None where none was named.

    Raises
    ------
    MoeGeomError
        As ``open_checkpoint`` and ``load_routers``; UsageError without tokens, RouterError where a
        router is missing or cannot read the inputs of the first, with both values.
    """
    if request.checkpoint_b is None:
        return None
    if source is None or isinstance(source, CountedSource):
        raise UsageError("--checkpoint-b needs --tokens, a recording of router inputs.")
    if _is_recording(request.checkpoint_b):
        raise UsageError(
            f"{request.checkpoint_b}: is a recording; --checkpoint-b expects a checkpoint.",
            "--run-b compares with what another run chose.",
        )
    set_b = load_routers(
        open_checkpoint(request.checkpoint_b, request.remote),
        requested_family=request.requested_family,
    )
    recorded = [router for router in routers if router.name in source.facts.routers]
    return routers_of_b(set_b, recorded)


def _is_recording(path: str) -> bool:
    try:
        return path != "" and (Path(path) / FACTS_FILE).is_file()
    except OSError:  # a name that cannot be: open_checkpoint says why
        return False


def routers_of_b(set_b: RouterSet, routers: Sequence[Router]) -> CheckpointB:
    """The routers of ``set_b`` with the names of ``routers``, whose inputs they are to read.

    Raises
    ------
    RouterError
        Where one is missing, has another size, or reads what follows from those inputs in no known
        way.
    """
    theirs = {router.name: router for router in set_b.routers}
    pairs = [(mine, _of_that_name(mine, theirs, set_b.checkpoint)) for mine in routers]
    return CheckpointB(
        checkpoint=set_b,
        routers={mine.name: _on_inputs_of(mine, its, set_b.checkpoint) for mine, its in pairs},
        equal=tuple(
            mine.name
            for mine, its in pairs
            if mine.rule == its.rule and _equal_arrays(mine, its, _DECIDING)
        ),
        regained=tuple(mine.name for mine, its in pairs if _has_other_gain(mine, its)),
        unknown_gain=tuple(
            mine.name for mine, its in pairs if _knows_gain(mine) != _knows_gain(its)
        ),
        has_same_rule=all(mine.rule == its.rule for mine, its in pairs),
    )


def _of_that_name(mine: Router, theirs: Mapping[str, Router], where: str) -> Router:
    """The router of the second checkpoint that stands where ``mine`` does."""
    if mine.name not in theirs:
        names = [*theirs]
        which = ", ".join(names) if len(names) < 5 else f"{names[0]} to {names[-1]}"
        raise RouterError(
            f"{where}: has no router {mine.name}; its "
            f"{number_of(len(theirs), 'router is', 'routers are')} {which}.",
            _OTHER_LAYERS,
        )
    its = theirs[mine.name]
    for what, size in _SIZES.items():
        if size(mine) != size(its):
            raise RouterError(
                f"{where}: router {mine.name} has {size(its)} {what}; that of the first checkpoint "
                f"has {size(mine)}.",
                f"Only routers of one shape choose for the same inputs. {_OTHER_LAYERS}",
            )
    if its.projection is not None and mine.projection is None:
        raise RouterRuleError(
            f"{where}: router {mine.name} stands behind a projection; that of the first checkpoint "
            "does not."
        )
    return its


def _on_inputs_of(mine: Router, its: Router, where: str) -> Router:
    r"""``its`` for the inputs of ``mine``: rows :math:`W_2 \operatorname{diag}(g_2 / g_1)`.

    Both routers then read the same normed vector, each through its own gain.
    """
    refuse_non_finite_rows(its, f"{where}: ")
    if not (_knows_gain(mine) and _knows_gain(its)):
        return its
    assert mine.norm is not None and its.norm is not None
    if mine.norm.kind != its.norm.kind:
        raise RouterRuleError(
            f"{where}: a norm of kind {its.norm.kind} stands before router {mine.name}; in the "
            f"first checkpoint one of kind {mine.norm.kind}.",
            _OTHER_LAYERS,
        )
    if mine.norm.kind == "layer" and not _equal_arrays(mine, its, ("gain", "norm_bias")):
        raise RouterRuleError(
            f"{where}: the layer norm before router {mine.name} has another gain or bias than that "
            "of the first checkpoint; only gains of RMS norms are carried over.",
            _OTHER_LAYERS,
        )
    if not _has_other_gain(mine, its):
        return its
    assert mine.gain is not None and its.gain is not None
    ours, other = mine.gain.astype(np.float64), its.gain.astype(np.float64)
    lost = np.flatnonzero((ours == 0.0) & (other != 0.0))
    if len(lost):
        raise RouterRuleError(
            f"{where}: the gain before router {mine.name} is {other[lost[0]]:.3g} at coordinate "
            f"{lost[0]}; in the first checkpoint it is 0 ({len(lost)} coordinates), and the "
            "recorded inputs do not say what comes through.",
            "Record the second checkpoint, and compare choices with --run-b.",
        )
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        factor = np.divide(other, ours, out=np.ones_like(ours), where=ours != 0.0)
        rows = (its.weight.astype(np.float64) * factor).astype(its.weight.dtype)
    scaled = dataclasses.replace(its, weight=rows)
    refuse_non_finite_rows(scaled, f"{where}, times its gain over that of the first checkpoint: ")
    return scaled


def _knows_gain(router: Router) -> bool:
    return router.gain is not None and router.norm is not None


def _has_other_gain(mine: Router, its: Router) -> bool:
    return _knows_gain(mine) and _knows_gain(its) and not _equal_arrays(mine, its, ("gain",))


def _equal_arrays(mine: Router, its: Router, names: Sequence[str]) -> bool:
    pairs = [(getattr(mine, name), getattr(its, name)) for name in names]
    return all(
        one is other if one is None or other is None else np.array_equal(one, other)
        for one, other in pairs
    )
