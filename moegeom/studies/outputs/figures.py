"""The figure of outputs: which experts the energy of the routed output comes from."""

from __future__ import annotations

from collections.abc import Iterator

from moegeom.core.text import percent
from moegeom.document.chart import Axis, Chart, Heat, Panel
from moegeom.document.place import place
from moegeom.studies.outputs.record import Outputs


def outputs_figures(found: Outputs) -> Iterator[Chart]:
    """One: the share of each expert in each layer, in shares of an even division."""
    routers = found.routers
    names = [place(each.router, [r.router for r in routers]) for each in routers]
    experts = max(router.num_experts for router in routers)
    shares = [[one.energy_share * r.num_experts for one in r.experts] for r in routers]
    heat = Heat(
        [[*row, *[None] * (experts - len(row))] for row in shares],
        "energy of the contributions, in shares of an even division",
        0.0,
        max(2.0, *(value for row in shares for value in row)),
        1.0,
    )
    layer = max(range(len(routers)), key=lambda i: max(shares[i]))
    most = max(routers[layer].experts, key=lambda one: one.energy_share)
    rows = [(router, one) for router in routers for one in router.experts]
    yield Chart(
        "energy",
        "Where the routed output comes from",
        "Squared length of what each expert adds (its output times the routing weight), summed "
        "over the tokens that chose it, beside an even division among all experts.",
        "Whether contributions cancel, and what the layers behind make of them.",
        f"Expert {most.expert} of layer {names[layer]} gives {percent(most.energy_share)} of the "
        "energy of its layer.",
        [
            Panel(
                "",
                Axis("expert", names=[str(e) for e in range(experts)]),
                Axis("layer", names=names),
                [heat],
            )
        ],
        [
            ("router", [router.router for router, _ in rows]),
            ("expert", [one.expert for _, one in rows]),
            ("num_tokens", [one.num_tokens for _, one in rows]),
            ("weight", [one.weight for _, one in rows]),
            ("output_norm", [one.output_norm for _, one in rows]),
            ("contribution_norm", [one.contribution_norm for _, one in rows]),
            ("energy_share", [one.energy_share for _, one in rows]),
        ],
    )
