"""Listening to an engine: at its gates, at what chooses behind them, around its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moegeom.core.errors import RecordingError
from moegeom.recorder.engines._gates import EngineGate
from moegeom.recorder.taps import Deliver

#: Begins to call back with experts [rows, slots] whenever one router has chosen; ends it.
Listen = Callable[[Callable[[torch.Tensor], None]], Callable[[], None]]


class GateTap:
    """One gate: its input when it is called, with the choice once that is made.

    The choice comes from elsewhere (``listen``), after the gate and before the next one; a router
    whose choice is made inside a fused kernel has none. ``guard`` runs what may fail.
    """

    def __init__(
        self,
        gate: EngineGate,
        listen: Listen | None,
        deliver: Deliver,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._gate, self._listen, self._deliver, self._guard = gate, listen, deliver, guard
        self._inputs: torch.Tensor | None = None

    def hooks(self) -> Iterator[Callable[[], None]]:
        """Begins to listen; each call that comes back ends a part of it."""
        hook = self._gate.module.register_forward_hook(self._called, with_kwargs=True)
        yield hook.remove
        if self._listen is not None:
            yield self._listen(self._chosen)

    def _called(
        self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        self._guard(lambda: self._take(next(iter((*arguments, *named.values())))))

    def _take(self, inputs: torch.Tensor) -> None:
        # blocks change their input in place: what counts is what it is now
        if self._inputs is not None:
            raise RecordingError(
                f"router {self._gate.router.name}: its gate was called a second time before a "
                "choice was made.",
                "Its choice is made where it cannot be heard: keep cannot be met for this engine.",
            )
        rows = inputs.detach().reshape(-1, self._gate.router.hidden_size).clone()
        if self._listen is None:
            self._deliver(self._gate.router.name, rows, None)
        else:
            self._inputs = rows

    def _chosen(self, experts: torch.Tensor) -> None:
        self._guard(lambda: self._join(experts))

    def _join(self, experts: torch.Tensor) -> None:
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        router = self._gate.router
        # columns of shared experts that were fused in stand behind
        chosen = experts.detach()[:, : router.rule.top_k].clone()
        self._deliver(router.name, inputs, chosen)


def wrap(owner: Any, method: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Calls ``around(original, *arguments)`` in place of a method of this one object; ends it."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, method, wrapped)
    return lambda: delattr(owner, method)
