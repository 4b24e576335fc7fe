"""What every report of balancing says in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moegeom.core.text import number_of
from moegeom.document.summary import Summary
from moegeom.studies.balance.screen._balance import NO_GUARANTEE, SENTENCES, Balance, RouterBalance


def summary_of(balance: Balance) -> Summary:
    """What the header needs."""
    layers = [{"router": router.router} for router in balance.routers]
    return Summary(balance.run, layers, [], [], [])


def verdicts(balance: Balance) -> list[tuple[str, str, str]]:
    """Meaning, routers and sentence, worst first."""
    summary = summary_of(balance)
    found = []
    for meaning, sentence in SENTENCES.items():
        routers = [r.router for r in balance.routers if r.meaning == meaning]
        if routers:
            found.append((meaning, summary.places(routers), sentence))
    return found


def mood(balance: Balance) -> str:
    """Green only where nothing is uneven."""
    return "good" if all(r.meaning == "balanced" for r in balance.routers) else "warning"


def sample_line(balance: Balance) -> str:
    """Which tokens the bias is made from, and on which it is tried."""
    total = balance.run["tokens"]["num_tokens"]
    part = "all of them" if balance.num_tokens == total else f"a sample (seed {balance.seed})"
    return (
        f"{number_of(balance.num_tokens, 'token')}, {part}. 'others': made on one half of the "
        f"{plural(balance.unit)}, tried on the other; the worse of both ways."
    )


def plural(unit: str) -> str:
    """``runs of 256 tokens``."""
    first, _, rest = unit.partition(" ")
    return f"{first}s {rest}".strip()


def remarks(balance: Balance) -> Iterator[tuple[str, str]]:
    """Place and text: experts that cannot be told apart, ties, and where no guarantee is given."""
    summary = summary_of(balance)
    for router in balance.routers:
        for experts, why in router.twins:
            named = ", ".join(map(str, experts[:8])) + (" ..." if len(experts) > 8 else "")
            text = f"experts {named} cannot be told apart by any bias ({why})."
            yield summary.places([router.router]), text
        if router.meaning == "none" and router.num_tied is not None:
            text = f"{router.num_tied:,} of {router.num_tokens:,} tokens are ties at the optimum."
            yield summary.places([router.router]), text
    grouped = [router.router for router in balance.routers if router.is_grouped]
    if grouped:
        yield summary.places(grouped), f"{NO_GUARANTEE}."
    for name, reason in balance.left_out:
        yield summary.place(name), f"not looked at: {reason}."


def pushed(router: RouterBalance) -> str:
    """The experts with the largest changes; ``up 3 +0.21, 7 +0.18; down 12 -0.4``."""
    pushes = router.pushes()
    up = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c > 0.0)
    down = ", ".join(f"{e} {c:+.2g}" for e, c in pushes if c < 0.0)
    said = [f"up {up}" if up else "", f"down {down}" if down else ""]
    return "; ".join(part for part in said if part) or "none"


def limits(balance: Balance) -> list[str]:
    """How to read the figures, and what they do not say."""
    units = sorted({router.num_units for router in balance.routers})
    count = f"{units[-1]} {plural(balance.unit)}"
    shares = sorted({100.0 * (1.0 - r.top_k / r.num_experts) for r in balance.routers})
    at_random = " to ".join(dict.fromkeys(f"{s:.3g}" for s in (shares[0], shares[-1])))
    halves = [r.worst for r in balance.routers if r.worst is not None]
    said = [
        (
            "'chance': MaxVio that even routing stays below in all routers together with "
            f"probability {1.0 - balance.level * len(balance.routers):.2f}, from the scatter of "
            f"{count}; for 'others' it holds the chance of both halves."
        )
    ]
    if halves:
        vio, cv = (max(h.max_vio_floor for h in halves), max(h.cv_floor for h in halves))
        said.append(
            f"The floor of as many independent tokens as in one half: MaxVio {figure(vio)}, CV "
            f"{figure(cv)}; with a bias made on the other half 1.41 times that. Tokens of one "
            "document are not independent."
        )
    said.append(
        "A bias evens out nearly any loads of these tokens. What that costs is the weight it moves "
        f"off the chosen experts ({at_random} % for a choice at random). This does not say that "
        "quality is lost, nor that it is kept."
    )
    return said


def figure(value: float) -> str:
    """Three digits at most, without the zero in front; ``-`` for what is not known."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "any"
    return f"{value:.2f}" if value < 99.5 else f"{value:.0f}"


def percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"
