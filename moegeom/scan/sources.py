"""Where the tokens of a command come from, and what cannot be asked of them."""

from __future__ import annotations

from collections.abc import Sequence

from moegeom.core.errors import UsageError
from moegeom.core.router import Router
from moegeom.core.tokens import TokenSource
from moegeom.scan.request import ScanRequest
from moegeom.tokens.counted import CountedSource
from moegeom.tokens.open import open_tokens
from moegeom.tokens.other_side import OtherSide, other_side
from moegeom.tokens.prior import IsotropicRmsPrior
from moegeom.tokens.source import KnownRouter

#: Tokens drawn from a synthetic prior when none are recorded.
PRIOR_TOKENS = 16_384


def open_source(
    request: ScanRequest, routers: Sequence[Router], whole: Sequence[Router] | None = None
) -> TokenSource | None:
    """The tokens to route: a recording, a trace, foreign files, or a synthetic prior.

    ``whole`` are all routers of the checkpoint, which a trace is held against; None where only
    ``routers`` are at hand, which are all of them unless layers were asked for.
    """
    if request.prior is not None:
        if request.tokens is not None or request.source is not None:
            raise UsageError("--prior and --tokens exclude each other.")
        if request.prior != IsotropicRmsPrior.name:
            raise UsageError(
                f"Unknown prior '{request.prior}'.", f"Known: {IsotropicRmsPrior.name}."
            )
        shapes = tuple((router.name, router.gain, router.hidden_size) for router in routers)
        return IsotropicRmsPrior(shapes, PRIOR_TOKENS, request.seed)
    if request.source is not None or request.tokens is None:
        return request.source
    names = tuple(router.name for router in routers)
    if whole is None:
        whole = routers if request.layers is None else ()
    return open_tokens(
        request.tokens,
        request.stage,
        request.router_map or None,
        names,
        known_routers(whole),
        request.dialect,
    )


def open_other(
    request: ScanRequest, source: TokenSource | None, whole: Sequence[Router]
) -> OtherSide | None:
    """What another run chose, matched to the tokens of this one; None where none was named."""
    if request.other is None:
        return None
    if source is None or isinstance(source, CountedSource):
        raise UsageError("--other needs --tokens, a recording of the same text.")
    known = known_routers(whole)
    return other_side(source, open_choices(request.other, request.other_dialect, known), known)


def open_choices(path: str, dialect: str | None, known: tuple[KnownRouter, ...]) -> TokenSource:
    """What another run chose, token by token: a recording or a trace.

    Raises
    ------
    UsageError
        When it holds counts only.
    """
    names = tuple(router.name for router in known)
    opened = open_tokens(path, None, None, names, known, dialect)
    if isinstance(opened, CountedSource):
        raise UsageError(
            f"{opened.facts.name}: holds counts only; they cannot be compared token by token.",
            "moegeom scan --tokens reads loads from them.",
        )
    return opened


def known_routers(whole: Sequence[Router]) -> tuple[KnownRouter, ...]:
    """What a trace is held against."""
    return tuple(KnownRouter(r.name, r.stack, r.layer, r.num_experts, r.rule.top_k) for r in whole)


def refuse_no_rows(request: ScanRequest, source: TokenSource | None) -> None:
    """Raises UsageError when a row per token is asked for and there are no tokens to give one."""
    if request.per_token and (source is None or isinstance(source, CountedSource)):
        what = "there are no tokens" if source is None else f"{source.facts.name} holds counts only"
        raise UsageError(f"--per-token: {what}.", "Name a recording with --tokens.")


def refuse_unknown_positions(request: ScanRequest, source: TokenSource | None) -> None:
    """Raises UsageError when tokens are to be left out by a position that nobody recorded."""
    if request.exclude_first < 1:
        return
    if source is None or not source.facts.has_documents:
        what = "no tokens" if source is None else f"{source.facts.name} holds no positions"
        raise UsageError(
            f"--exclude-first {request.exclude_first}: {what}.",
            "It needs a recording that says where documents begin.",
        )
