"""What a what-if is: another way to choose experts on the same tokens.

``moegeom whatif --router NAME[:PARAMETER,...]``: the kinds stand in ``variants/whatif/``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moegeom.core.errors import UsageError
from moegeom.core.registry import Rooms, record_of_function, unknown_name
from moegeom.core.router import Router
from moegeom.core.row_keys import RANDOM
from moegeom.core.shapes import Float64, Int32
from moegeom.kernels.batch import TokenBatch
from moegeom.kernels.reduction import Kernels


@dataclass(frozen=True)
class Parameter:
    """A number that a kind takes: ``name=value``.

    ``least`` and ``most`` are allowed values themselves; without a ``default`` it may be left out,
    and is None then. A ``is_list`` parameter takes every further value, each once and in order:
    ``without:17,42``; each value of one that ``is_swept`` is a what-if of its own:
    ``temperature:0.5,2``. ``words`` are allowed instead of numbers.
    """

    name: str
    text: str
    default: float | str | None = None
    least: float = -np.inf
    most: float = np.inf
    is_whole: bool = False
    is_list: bool = False
    is_swept: bool = False
    words: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether its values may stand alone, in front of other parameters."""
        return self.is_list or self.is_swept


@dataclass(frozen=True, eq=False)
class WhatIfChoice:
    """What a what-if chooses for some tokens.

    ``chosen`` are experts in descending score, filled from the left; -1 where there are fewer.
    ``weights`` are their routing weights, 0 where there is none. ``quantities`` are others of
    ``TokenBatch`` by name; what is not there is missing for the reason in ``FittedGate.absent``.
    """

    chosen: Int32[np.ndarray, "tokens slots"]
    weights: Float64[np.ndarray, "tokens slots"]
    quantities: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitSample:
    """What a kind is fitted to: whole tiles of the tokens of one router.

    ``tokens`` has ``logits``, ``mapped``, ``selection``, ``scores``, ``chosen``, ``weights``,
    ``token``, ``document`` and, of a recording that holds them, ``input``.
    """

    tokens: TokenBatch
    kernels: Kernels
    batch: int
    seed: int


@dataclass(frozen=True, eq=False)
class FittedGate:
    """A what-if made for one router.

    Either ``router`` is another router, which chooses by its own rule, or ``choose`` takes a batch
    of the router as stored (``logits``, ``mapped``, ``selection``, ``scores``, ``chosen``,
    ``weights``, ``input``, ...) to the choice. Of a gate that is not ``is_token_local`` it is
    called with the tokens of one batch, so many neighbours. ``reached`` are figures by name, that
    the fit found (``eps``); ``absent`` quantities of ``TokenBatch`` that it cannot give, with the
    reason; ``measure`` finds more figures on the sample; ``notes`` are sentences for a reader.
    """

    router: Router | None = None
    choose: Callable[[TokenBatch], WhatIfChoice] | None = None
    has_fixed_size: bool = True
    is_token_local: bool = True
    is_causal: bool = True
    reached: Mapping[str, float] = field(default_factory=dict)
    measure: Callable[[FitSample], Mapping[str, float]] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


#: The value of each parameter: None, number, word or tuple.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class WhatIf:
    """A kind of what-if, from the function ``make`` that fits it to a router, given the values.

    It raises RouterRuleError where the what-if means nothing for the rule. ``page`` is its
    docstring, which ends with the limit in which the router itself chooses. ``needs`` are
    quantities of ``TokenBatch`` without which it cannot be made, such as ``input``. Of the
    parameters ``one_of`` exactly one is given; none of them has a default.
    """

    name: str
    page: str
    make: Callable[[Router, Values, FitSample], FittedGate]
    parameters: tuple[Parameter, ...] = ()
    needs: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The sentence of the list."""
        return self.page.partition("\n")[0]


def what_if(
    *parameters: Parameter, needs: tuple[str, ...] = (), one_of: tuple[str, ...] = ()
) -> Callable[[Callable[[Router, Values, FitSample], FittedGate]], WhatIf]:
    """The decorator that makes a kind of the function that fits it."""
    return record_of_function(WhatIf)(parameters, needs, one_of)


#: Kinds by name; people write hyphens.
WHAT_IFS = Rooms("what-if", "moegeom.variants.whatif", WhatIf)


# -------------------------------------------------------------------------------------------- specs
#: Characters of what was typed that a message repeats.
_QUOTED = 80


@dataclass(frozen=True)
class AskedWhatIf:
    """A kind with a value for each parameter; ``name`` is how it is typed, in one spelling."""

    name: str
    kind: WhatIf
    values: Mapping[str, Any]


def parse_what_ifs(texts: Sequence[str]) -> tuple[AskedWhatIf, ...]:
    """What texts such as ``smooth:extra=0.5`` or ``temperature:0.5,2`` ask for, each once.

    Raises
    ------
    UsageError
        For a kind or parameter that is not known, a number out of its range, a value that is
        missing, or two that exclude each other.
    """
    by_name: dict[str, AskedWhatIf] = {}
    for text in texts:
        for one in _parse(text):
            by_name.setdefault(one.name, one)
    return tuple(by_name.values())


def spelled(kind: WhatIf) -> str:
    """The name of a kind as people write it."""
    return kind.name.replace("_", "-")


def _parse(text: str) -> Iterator[AskedWhatIf]:
    name, colon, rest = text.strip().partition(":")
    kind = _kind(name)
    terms = _given(text, kind, rest.split(",") if colon else [])
    values = {p.name: terms.get(p.name, (p.default,)) for p in kind.parameters}
    for parameter in kind.parameters:
        if parameter.is_list:
            values[parameter.name] = (tuple(sorted(set(terms.get(parameter.name, ())))),)
        elif len(values[parameter.name]) > 1 and not parameter.is_swept:
            raise _error(text, kind, f"'{parameter.name}' has several values")
    if kind.one_of and sum(name in terms for name in kind.one_of) != 1:
        either = "either " * (len(kind.one_of) > 1)
        raise _error(text, kind, f"it needs {either}{' or '.join(kind.one_of)}")
    for chosen in itertools.product(*values.values()):
        one = dict(zip(values, chosen, strict=True))
        spelling = ",".join(
            _spelling(p, one[p.name])
            for p in kind.parameters
            if p.name in terms and one[p.name] != ()
        )
        yield AskedWhatIf(f"{spelled(kind)}:{spelling}" if spelling else spelled(kind), kind, one)


def _kind(name: str) -> WhatIf:
    # results call the random router of every scan so: the what-if has a name of its own
    place = "random_rows" if name == RANDOM else name.replace("-", "_")
    if place not in WHAT_IFS.names():
        raise unknown_name("what-if", name[:_QUOTED], map(spelled, WHAT_IFS.all()))
    return WHAT_IFS[place]


def _given(text: str, kind: WhatIf, words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values by parameter; a value without a name belongs to the one before, or the first."""
    by_name = {p.name: p for p in kind.parameters}
    current = next((p for p in kind.parameters if p.is_first), None)
    terms: dict[str, tuple[Any, ...]] = {}
    for word in (word.strip() for word in words):
        name, equals, value = word.partition("=")
        if equals:
            if name not in by_name:
                names = ", ".join(by_name) or "none"
                raise _error(text, kind, f"it has no '{name[:40]}' ({names})")
            if name in terms:
                raise _error(text, kind, f"'{name}' is given twice")
            current = by_name[name]
        elif name in by_name:
            raise _error(text, kind, f"'{name}' has no value")
        else:
            value = word
        if current is None:
            raise _error(text, kind, f"'{word[:40]}' stands without a name")
        entry = _value(text, kind, current, value)
        terms[current.name] = (*terms.get(current.name, ()), entry)
    return terms


def _value(text: str, kind: WhatIf, parameter: Parameter, word: str) -> float | int | str:
    if word in parameter.words:
        return word
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    fits = parameter.least <= number <= parameter.most
    if not fits or (parameter.is_whole and not number.is_integer()):
        expected = [*parameter.words] if parameter.words else []
        if not parameter.words or np.isfinite(parameter.least):
            what = "a whole number" if parameter.is_whole else "a number"
            expected.append(f"{what} from {parameter.least:g} to {parameter.most:g}")
        raise _error(
            text, kind, f"{parameter.name} is '{word[:40]}', expected {' or '.join(expected)}"
        )
    # + 0.0: -0 is 0
    return int(number) if parameter.is_whole else number + 0.0


def _spelling(parameter: Parameter, value: Any) -> str:
    listed = value if isinstance(value, tuple) else (value,)
    words = ",".join(one if isinstance(one, str) else _digits(one) for one in listed)
    return words if parameter.is_first else f"{parameter.name}={words}"


def _digits(number: float) -> str:
    """The shortest text that is this very number when it is read again."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _error(text: str, kind: WhatIf, why: str) -> UsageError:
    return UsageError(
        f"what-if '{text[:_QUOTED]}': {why}.",
        f"{spelled(kind)}: {kind.text} `moegeom whatif --list` shows all with their parameters.",
    )


# ---------------------------------------------------------------------------------------- the list
def describe_what_ifs() -> list[dict[str, str]]:
    """A row for each kind: its name, its parameters with their values, what it is."""
    return [
        {
            "what-if": spelled(kind),
            "parameters": ", ".join(map(_described, kind.parameters)) or "-",
            "is": " ".join([kind.text, "; ".join(f"{p.name}: {p.text}" for p in kind.parameters)]),
        }
        for kind in WHAT_IFS.all()
    ]


def _described(parameter: Parameter) -> str:
    if parameter.default is None:
        return parameter.name
    default = parameter.default
    return f"{parameter.name}={default if isinstance(default, str) else format(default, 'g')}"
