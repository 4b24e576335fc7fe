"""What a what-if is: another way to choose experts on the same tokens.

``moegeom whatif --router NAME[:PARAMETER,...]``: each kind is a file of ``variants/whatif/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32

from moegeom.core.registry import Registry
from moegeom.core.router import Router
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels


@dataclass(frozen=True)
class Parameter:
    """A number that a kind takes: ``name=value``, or the value alone where ``is_first``.

    ``least`` and ``most`` are allowed values themselves; without a ``default`` it may be left out,
    and is None then. A ``is_list`` parameter takes every further value: ``without:17,42``; each
    value of one that ``is_swept`` is a what-if of its own: ``temperature:0.5,2``. ``words`` are
    allowed instead of numbers; a ``is_flag`` is written alone: ``sinkhorn:log``.
    """

    name: str
    text: str
    default: float | str | None = None
    least: float = -np.inf
    most: float = np.inf
    is_whole: bool = False
    is_first: bool = False
    is_list: bool = False
    is_swept: bool = False
    is_flag: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Choice:
    """What a what-if chooses for some tokens.

    ``chosen`` are experts in descending score, filled from the left; -1 where there are fewer.
    ``weights`` are their routing weights, 0 where there is none. ``quantities`` are others of
    ``TokenBatch`` by name; what is not there is missing for the reason in ``Gate.absent``.
    """

    chosen: Int32[np.ndarray, "tokens slots"]
    weights: Float64[np.ndarray, "tokens slots"]
    quantities: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Sample:
    """What a kind is fitted to: whole tiles of the tokens of one router.

    ``tokens`` has ``logits``, ``mapped``, ``selection``, ``scores``, ``chosen``, ``weights``,
    ``token``, ``document`` and, of a recording that holds them, ``input``.
    """

    tokens: TokenBatch
    kernels: Kernels
    batch: int
    seed: int


@dataclass(frozen=True, eq=False)
class Gate:
    """A what-if made for one router.

    Either ``router`` is another router, which chooses by its own rule, or ``choose`` takes a batch
    of the router as stored (``logits``, ``mapped``, ``selection``, ``scores``, ``chosen``,
    ``weights``, ``input``, ...) to the choice. Of a gate that is not ``is_token_local`` it is
    called with the tokens of one batch, so many neighbours. ``reached`` are figures by name, that
    the fit found (``eps``); ``absent`` quantities of ``TokenBatch`` that it cannot give, with the
    reason; ``measure`` finds more figures on the sample; ``notes`` are sentences for a reader.
    """

    router: Router | None = None
    choose: Callable[[TokenBatch], Choice] | None = None
    has_fixed_size: bool = True
    is_token_local: bool = True
    is_causal: bool = True
    reached: Mapping[str, float] = field(default_factory=dict)
    measure: Callable[[Sample], Mapping[str, float]] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WhatIf:
    """A kind of what-if: one file, one record.

    ``needs`` are quantities of ``TokenBatch`` without which it cannot be made, such as ``input``.
    ``make`` fits it to a router, given the value of each parameter (None, number, word, flag or
    tuple). It raises RouterRuleError where it means nothing for the rule.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    make: Callable[[Router, Mapping[str, Any], Sample], Gate]
    needs: tuple[str, ...] = ()


#: Kinds by file name; people write hyphens.
WHAT_IFS: Registry[WhatIf] = Registry("what-if", "moegeom.variants.whatif", "WHAT_IF", WhatIf)
