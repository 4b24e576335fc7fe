r"""Parameters of a layer of experts, and multiply-accumulates (MACs) of what routes a token.

One MAC is two floating-point operations (FLOP). Biases, norms, activations and the choice itself
are left out: they are of the order of E or D, not of their product.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights that one token uses, and that there are."""

    active: int
    total: int


@dataclass(frozen=True)
class PublishedParameters:
    """What Table 1 of S1 counts for inputs of n numbers."""

    dense: Parameters
    top_1: Parameters
    top_k: Parameters
    normalised: Parameters


def published_parameters(num_experts: int, k: int, width: int, hidden: int) -> PublishedParameters:
    r"""Active and total :math:`n N, n N; \; n N, E n N; \; k n N, E n N; \; n N, (E/k) n N`.

    One matrix per expert, where experts have two, gated ones three; no router. The last total is
    rounded down. For sizes of 1 and more. Source: S1 Table 1; docs/theory.md B5.
    """
    one = hidden * width
    return PublishedParameters(
        dense=Parameters(one, one),
        top_1=Parameters(one, num_experts * one),
        top_k=Parameters(k * one, num_experts * one),
        normalised=Parameters(one, num_experts * one // k),
    )


def expert_parameters(hidden: int, width: int, is_gated: bool) -> int:
    r"""Weights of one expert: :math:`3 D N` gated (gate, up, down), :math:`2 D N` not.

    As many MACs per token that it serves. Source: docs/theory.md B5; oracle in tests: the tensors
    of a stored expert.
    """
    return (3 if is_gated else 2) * hidden * width


def layer_parameters(
    num_experts: int, k: int, hidden: int, width: int, shared_width: int, is_gated: bool
) -> Parameters:
    r"""Of a layer: :math:`k c D N + c D N_s + E D` active, :math:`E c D N + c D N_s + E D` total.

    c = 3 for gated experts, else 2; :math:`N_s` neurons of all shared experts together, which run
    for every token; E D is the router. Source: docs/theory.md B5; oracle in tests: the sizes of the
    tensors of a stored layer.
    """
    one = expert_parameters(hidden, width, is_gated)
    always = expert_parameters(hidden, shared_width, is_gated) + num_experts * hidden
    return Parameters(k * one + always, num_experts * one + always)


@dataclass(frozen=True)
class RouterMacs:
    """MACs per token by kind of router; ``sinkhorn`` comes on top of the logits of another."""

    linear: int
    cosine: int
    gru: int
    projector: int
    sinkhorn: int


def router_macs(
    num_experts: int, hidden: int, router_dim: int = 128, iterations: int = 3
) -> RouterMacs:
    r"""What scoring E experts costs, with R = ``router_dim`` and T iterations.

    .. math:: E D; \quad R D + E R; \quad 3 (D E R + (E R)^2); \quad D E R; \quad T E

    A row per expert; a projection and cosines in it; a gated recurrent unit with a state of E R
    numbers, whose three gates each read the input and the state; a projection to E vectors of R
    numbers; row and column scaling of Sinkhorn, per token of a batch. For sizes of 1 and more.
    Source: S3 A.3.6 counts one gate and no recurrence; docs/theory.md D4; oracle in tests: the
    parameters of torch's own cell.
    """
    state = num_experts * router_dim
    return RouterMacs(
        linear=num_experts * hidden,
        cosine=router_dim * hidden + state,
        gru=3 * (hidden * state + state**2),
        projector=hidden * state,
        sinkhorn=iterations * num_experts,
    )


@dataclass(frozen=True)
class PublishedMacs:
    """What the SPECTRA draft counts, per token, as FLOP."""

    gru: int
    projector: int
    experts: int
    sinkhorn: int


def published_macs(
    num_experts: int,
    k: int,
    hidden: int,
    router_dim: int = 128,
    iterations: int = 3,
    num_tokens: int = 2048,
) -> PublishedMacs:
    r"""The printed counts :math:`D E R, \; D R, \; k D^2, \; T\,n\,E`, the last for n tokens.

    Source: S3 A.3.6; docs/theory.md D4 says what is wrong with each.
    """
    return PublishedMacs(
        gru=hidden * num_experts * router_dim,
        projector=hidden * router_dim,
        experts=k * hidden**2,
        sinkhorn=iterations * num_tokens * num_experts,
    )
