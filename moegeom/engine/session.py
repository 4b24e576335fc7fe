"""One opening for all commands: a checkpoint, its routers, tokens, and the proof that they fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moegeom.checkpoint.open import open_place
from moegeom.checkpoint.reading import Location
from moegeom.checkpoint.store import TensorStore
from moegeom.core.errors import RecordingError, RouterError, RouterRuleError, UsageError, about
from moegeom.core.router import Router, RouterSet, parse_layers
from moegeom.core.shapes import Int64
from moegeom.core.text import number_of
from moegeom.core.tokens import SampleCounts, TokenSource
from moegeom.engine.plan import SAMPLE_TOKENS
from moegeom.engine.prepared import prepare
from moegeom.engine.request import Terms, Tokens, TokensRequest, tokens_path
from moegeom.engine.run_facts import run_facts
from moegeom.engine.sample import Sample, draw_sample
from moegeom.engine.sources import heard_routers, num_first_tokens, open_source
from moegeom.engine.trust import Trust, examine
from moegeom.kernels.table import load_kernels
from moegeom.router.load import load_routers
from moegeom.tokens.source import Company

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Session:
    """A checkpoint and, where there are any, tokens: all ``routers``, and those of the layers that
    ``terms`` ask for (``chosen``).

    ``source`` and ``trust`` are None without tokens; ``num_first`` of these are left out as the
    first of their documents. ``started`` is a time of ``perf_counter``.
    """

    terms: Terms
    location: Location
    store: TensorStore
    routers: RouterSet
    chosen: tuple[Router, ...]
    started: float
    source: TokenSource | None = None
    trust: Trust | None = None
    num_first: int = 0

    @classmethod
    def open(
        cls, request: TokensRequest, with_listed: bool = False, with_varying: bool = False
    ) -> Session:
        """Reads the routers, opens the tokens and tests whether they belong together.

        ``with_listed`` keeps routers of which nothing but recorded
        choices can be measured, ``with_varying`` those whose tokens choose different numbers of
        experts.

        Raises
        ------
        MoeGeomError
            One of its subclasses: what cannot be read, or tokens that cannot be believed.
        """
        session = cls.of(
            request.checkpoint, request, with_listed=with_listed, with_varying=with_varying
        )
        return session.on(request.tokens)

    @classmethod
    def of(
        cls,
        checkpoint: str | Path,
        terms: Terms,
        *,
        with_listed: bool = False,
        with_varying: bool = False,
        is_whole: bool = True,
    ) -> Session:
        """The checkpoint, before its tokens are opened.

        Unless ``is_whole`` no other layers are read than those asked for; recordings belong to all.

        Raises
        ------
        MoeGeomError
            One of its subclasses: what cannot be read.
        """
        started = time.perf_counter()
        location, store = open_place(checkpoint, terms.remote)
        layers = None if is_whole else terms.layers
        try:
            routers = load_routers(store, layers, terms.requested_family, with_listed)
        except RouterError as refusal:
            refusal.checkpoint = store.label
            raise
        chosen = tuple(select_layers(routers, terms.layers))
        seconds, count = time.perf_counter() - started, number_of(len(chosen), "router")
        _LOG.info("%s: %s of %s, read in %.2f s", store.label, count, routers.family, seconds)
        if not with_varying:
            _refuse_varying(store, chosen)
        return cls(terms, location, store, routers, chosen, started)

    def on(self, tokens: Tokens | None, company: Company | None = None) -> Session:
        """The same with these tokens, without listed routers of which they hold no choices.

        ``company`` goes with the first pass over traces.

        Raises
        ------
        MoeGeomError
            One of its subclasses: tokens that cannot be read, or cannot be believed.
        """
        whole = self.routers.routers
        source = open_source(self.terms, tokens, self.chosen, whole, company)
        routers, chosen = heard_routers(self.routers, source), self.chosen
        if routers is not self.routers:
            chosen = tuple(select_layers(routers, self.terms.layers))
        opened = replace(
            self,
            routers=routers,
            chosen=chosen,
            source=source,
            num_first=num_first_tokens(self.terms, source),
        )
        if source is not None:
            facts = source.facts
            _LOG.info("%s: %s tokens, %s", facts.name, f"{facts.num_tokens:,}", facts.stage)
        return replace(opened, trust=opened._examined(tokens_path(tokens)))

    def sample(
        self,
        router: Router,
        names: Sequence[str],
        most: int = SAMPLE_TOKENS,
        at: Int64[np.ndarray, "tokens"] | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> Sample:
        """Quantities of some tokens at one router, as :func:`moegeom.engine.sample.draw_sample`."""
        assert self.source is not None, "a study of samples has tokens"
        return draw_sample(router, self.source, self.terms, names, most, at, advance)

    def _examined(self, path: str | None) -> Trust | None:
        """Stops the run when the tokens cannot be believed."""
        if self.source is None:
            return None
        names = self.source.facts.routers
        with about("tokens", path):
            return examine(
                (prepare(router) for router in self.chosen if router.name in names),
                self.source,
                self.routers.fingerprint,
                load_kernels(self.terms.backend),
                {"stale_inputs": self.terms.stale_inputs, "unverified": self.terms.unverified},
            )

    def sample_counts(self, samples: Sequence[Sample], is_named: bool = False) -> SampleCounts:
        """How many tokens samples of some routers are of; the most that are not finite at one."""
        assert self.source is not None, "there are samples"
        lost, outliers = (
            max((getattr(one, name) for one in samples), default=0)
            for name in ("num_non_finite", "num_outliers")
        )
        num_drawn = max((one.num_drawn for one in samples), default=0)
        seed = None if is_named else self.terms.seed
        return SampleCounts(self.source.facts.num_tokens, num_drawn, lost, seed, outliers)

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
        routers = [router for router in self.chosen if router.name in facts.routers]
        if not routers:
            raise RecordingError(
                f"{facts.name}: records none of the routers asked for.",
                f"It records {', '.join(facts.routers[:4])}.",
            )
        return routers

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
            "layers_requested": self.terms.layers,
            "exclude_first": self.terms.exclude_first,
            "num_first": self.num_first,
        }


def _refuse_varying(store: TensorStore, routers: Sequence[Router]) -> None:
    """Raises RouterRuleError for rules without a k, where a command is about the k best."""
    varying = [r.name for r in routers if not r.listed and r.rule.num_chosen is None]
    if varying:
        raise RouterRuleError(
            f"{store.label}: router {varying[0]} ({len(varying)} of {len(routers)} are such) takes "
            "every expert above a threshold; this command is about rules that choose the k best.",
            "moegeom list routers, check, scan, track and whatif measure it.",
        )


def select_layers(routers: RouterSet, layers: str | None) -> list[Router]:
    """The routers of the layers asked for; UsageError when there is none."""
    if layers is None:
        return list(routers.routers)
    numbers = parse_layers(layers)
    chosen = [router for router in routers.routers if router.layer in numbers]
    if not chosen:
        existing = ", ".join(str(router.layer) for router in routers.routers)
        raise UsageError(f"--layers {layers} names no layer with a router.", f"Known: {existing}.")
    return chosen
