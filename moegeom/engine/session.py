"""One opening for all commands: a checkpoint, its routers, tokens, and the proof that they fit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RecordingError, UsageError, about
from moegeom.core.router import Router, RouterSet, parse_layers
from moegeom.core.tokens import TokenSource
from moegeom.engine.prepared import prepare
from moegeom.engine.request import TokensRequest
from moegeom.engine.run_facts import run_facts
from moegeom.engine.sources import heard_routers, open_source
from moegeom.engine.trust import Trust, examine
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers


@dataclass(frozen=True, eq=False)
class Session:
    """What a request names, opened: all ``routers``, those of the layers asked for (``chosen``).

    ``source`` and ``trust`` are None where it names no tokens; ``started`` is a time of
    ``perf_counter``.
    """

    request: TokensRequest
    store: TensorStore
    routers: RouterSet
    chosen: tuple[Router, ...]
    source: TokenSource | None
    trust: Trust | None
    started: float

    @classmethod
    def open(
        cls, request: TokensRequest, prior: str | None = None, with_listed: bool = False
    ) -> Session:
        """Reads the routers, opens the tokens and tests whether they belong together.

        ``prior`` draws tokens instead; ``with_listed`` keeps routers of which nothing but recorded
        choices can be measured.

        Raises
        ------
        MoeGeomError
            One of its subclasses: what cannot be read, or tokens that cannot be believed.
        """
        started = time.perf_counter()
        store = open_checkpoint(request.checkpoint, request.remote)
        found = load_routers(store, asked=request.asked, with_listed=with_listed)
        source = open_source(request, select_layers(found, request.layers), found.routers, prior)
        routers = heard_routers(found, source)
        chosen = tuple(select_layers(routers, request.layers))
        trust = examine_tokens(request, routers, chosen, source)
        return cls(request, store, routers, chosen, source, trust, started)

    @property
    def recorded(self) -> list[Router]:
        """Those of the chosen routers that the tokens are of: all of them without tokens.

        Raises
        ------
        RecordingError
            When the tokens are of none of them.
        """
        if self.source is None:
            return list(self.chosen)
        facts = self.source.facts
        found = [router for router in self.chosen if router.name in facts.routers]
        if not found:
            raise RecordingError(
                f"{facts.name}: records none of the routers asked for.",
                f"It records {', '.join(facts.routers[:4])}.",
            )
        return found

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Chosen routers that the tokens are not of, each with that reason."""
        if self.source is None:
            return ()
        facts = self.source.facts
        absent = [router.name for router in self.chosen if router.name not in facts.routers]
        return tuple((name, f"{facts.name} does not record it") for name in absent)

    def facts(self, routers: Sequence[Router]) -> dict[str, Any]:
        """What the header of a report on some of the routers says of checkpoint and tokens."""
        tokens = None if self.source is None else self.source.facts
        return run_facts(self.routers, routers, tokens, self.trust) | {
            "seconds": time.perf_counter() - self.started,
            "layers_requested": self.request.layers,
        }


def select_layers(routers: RouterSet, layers: str | None) -> list[Router]:
    """The routers of the layers asked for; UsageError when there is none."""
    if layers is None:
        return list(routers.routers)
    wanted = parse_layers(layers)
    chosen = [router for router in routers.routers if router.layer in wanted]
    if not chosen:
        known = ", ".join(str(router.layer) for router in routers.routers)
        raise UsageError(f"--layers {layers} names no layer with a router.", f"Known: {known}.")
    return chosen


def examine_tokens(
    request: TokensRequest,
    routers: RouterSet,
    chosen: Sequence[Router],
    source: TokenSource | None,
) -> Trust | None:
    """Stops the run when the tokens cannot be believed."""
    if source is None:
        return None
    recorded = [router for router in chosen if router.name in source.facts.routers]
    with about("tokens", request.tokens):
        return examine(
            (prepare(router) for router in recorded),
            source,
            routers.fingerprint,
            load_kernels(request.backend),
            {"stale_inputs": request.stale_inputs, "unverified": request.unverified},
        )
