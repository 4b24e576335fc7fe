"""Folding inside a Trainer of transformers or TRL: every so many steps the tokens of one step."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.trainer_callback import TrainerCallback

from moegeom.core.errors import MoeGeomError, RecordingError, UsageError
from moegeom.core.shapes import Bool, Int
from moegeom.recorder.ranks import ranks_of
from moegeom.recorder.recorder import RouterRecorder
from moegeom.results.reader import Results, open_results
from moegeom.router.requested_family import NOTHING_ASKED, RequestedFamily

#: What is logged of each group of layers, and which router of the group is the worst.
LOGGED: dict[str, Literal["largest", "least"]] = {
    "max_vio_global": "largest",
    "load_cv_ddof0": "largest",
    "num_dead": "largest",
    "bf16_flip_share_isotropic": "largest",
    "routing_entropy_normalised": "least",
}


class FoldCallback(TrainerCallback):
    """Measures the routers while they train, and logs the worst of them.

    ::

        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(FoldCallback(trainer, "runs/routers", every=500))
        trainer.train()

    The forward passes of a step, gradient accumulation and all, are folded as by
    ``RouterRecorder(fold=True)`` into ``OUT/step_N``, N the optimiser steps that the weights have
    had: the routers of ``checkpoint-N``. Then ``trainer.log`` gets ``routers/<layers>/<figure>``,
    the figure of the worst router of a group of layers, and ``.../<figure>_layer``, its layer.

    Left out are padding, passes in evaluation mode or without gradients, and second passes over the
    same tokens (activation checkpointing). Nothing that the model computes changes: of a compiled
    model the passes of such a step are run uncompiled, since compiled ones call no hooks.

    Parameters
    ----------
    trainer
        A ``transformers.Trainer`` or one of its kin; also what the numbers are logged by.
    out
        The folder of the results directories, which ``moegeom track OUT/step_*`` reads.
    every
        Steps from one measurement to the next; the first one is before the first step. A step whose
        results are there already, in a run that goes on, is passed over.
    layer_groups
        Into how many groups of neighbours the layers of a stack are cut.
    family
        For models of no known family, as in ``RouterRecorder``.
    group
        The process group of the ranks that run different tokens, where it is not all of them.

    Raises
    ------
    MoeGeomError
        At the first measurement. One that fails later is a warning, leaves no results, and lets the
        training go on.
    """

    def __init__(
        self,
        trainer: Any,
        out: str | Path,
        *,
        every: int = 500,
        layer_groups: int = 3,
        family: RequestedFamily = NOTHING_ASKED,
        group: Any = None,
    ) -> None:
        if every < 1 or layer_groups < 1:
            raise UsageError(f"every={every}, layer_groups={layer_groups}: expected 1 or more.")
        if trainer.args.n_gpu > 1:
            raise UsageError(
                f"one process drives {trainer.args.n_gpu} devices by copies of the model, which "
                "call no hooks.",
                "Start a process for each device, as torchrun does.",
            )
        self._trainer, self._out = trainer, Path(out)
        self._every, self._layer_groups = every, layer_groups
        self._family, self._group = family, group
        self._step: _FoldedStep | None = None
        self._has_worked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to listen where a measurement is due."""
        self._leave()
        if state.global_step % self._every:
            return
        ranks = ranks_of(None, None, self._group)
        out = self._out / f"step_{state.global_step}"
        if not any(ranks.everywhere(out.exists())):
            self._step = _FoldedStep(self._trainer, out, self._family, self._group)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the measurement, before the routers change, and logs it."""
        step, self._step = self._step, None
        if step is None:
            return
        ranks = ranks_of(None, None, self._group)
        # what one rank logs all of them do, and where one failed none has results
        failure = next(filter(None, ranks.everywhere(step.failure)), None)
        if failure is not None:
            step.leave()
        reports = ranks.everywhere(failure or step.finish(ranks.rank == 0, self._layer_groups))
        numbers: dict[str, float] = {}
        for report in reports:
            if isinstance(report, MoeGeomError):
                self._refuse(report, step.out)
                return
            numbers |= report
        self._has_worked = True
        should_log = control.should_log
        self._trainer.log(numbers)
        control.should_log = should_log  # logging takes it back, and the loss is still to come

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops a step that never ended."""
        self._leave()

    def _leave(self) -> None:
        if self._step is not None:
            self._step.leave()
        self._step = None

    def _refuse(self, failure: MoeGeomError, out: Path) -> None:
        if not self._has_worked:
            raise failure
        warnings.warn(f"{out.name} was not measured: {failure}", RuntimeWarning, stacklevel=2)


class _FoldedStep:
    """The forward passes of one step on their way into results.

    A ``failure`` is kept, so that no pass of the training ends by it.
    """

    def __init__(self, trainer: Any, out: Path, family: RequestedFamily, group: Any) -> None:
        self.out, model = out, trainer.model
        self.failure: MoeGeomError | None = None
        self._num_documents = 0
        self._ranks = ranks_of(None, None, group)
        self._stack = ExitStack()
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._recorder = self._stack.enter_context(
                RouterRecorder(model, out, fold=True, family=family, group=group)
            )
        except MoeGeomError as failure:
            self.failure = failure
            return
        if _is_compiled(trainer.model_wrapped):
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        handle = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._stack.callback(handle.remove)

    def _before(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.failure or not (model.training and torch.is_grad_enabled()):
            return
        try:
            self._announce(model, named.get("input_ids", *arguments[:1]), named)
        except MoeGeomError as failure:
            self.failure = failure

    def _announce(self, model: Any, ids: Any, named: dict[str, Any]) -> None:
        if not isinstance(ids, torch.Tensor):
            raise RecordingError(
                "the model was given no input_ids.",
                "Record in a loop of your own: RouterRecorder.tokens() takes ids from anywhere.",
            )
        positions = named.get("position_ids")
        if positions is None or positions.shape != ids.shape:
            self._recorder.tokens(ids, _attended(ids, named, model))
            return
        is_first = _begins_document(positions)
        number = is_first.reshape(-1).cumsum(0).reshape(ids.shape) - 1 + self._num_documents
        self._num_documents += int(is_first.sum())
        self._recorder.tokens(
            ids,
            _attended(ids, named, model),
            documents=number * self._ranks.num_ranks + self._ranks.rank,
            positions=positions,
        )

    def finish(self, is_writer: bool, layer_groups: int) -> dict[str, float] | MoeGeomError:
        """What is to be logged, where this rank has written the results; why not, otherwise."""
        try:
            self._stack.close()
            if not is_writer:
                return {}
            return worst_of_groups(open_results(self.out), layer_groups)
        except MoeGeomError as failure:
            return failure

    def leave(self) -> None:
        """Ends without results."""
        failure = self.failure or RecordingError("the step never came to its end.")
        self._stack.__exit__(type(failure), failure, None)


def worst_of_groups(results: Results, layer_groups: int) -> dict[str, float]:
    """``routers/<layers>/<figure>`` of the worst router of each group, and its layer."""
    logged: dict[str, float] = {}
    rows = results.layers().to_pylist()
    for stack in dict.fromkeys(row["router"].split("/")[0] for row in rows):
        of_stack = [row for row in rows if row["router"].split("/")[0] == stack]
        count = min(layer_groups, len(of_stack))
        edges = [len(of_stack) * i // count for i in range(count + 1)]
        for start, stop in pairwise(edges):
            group = of_stack[start:stop]
            first, last = group[0]["layer"], group[-1]["layer"]
            name = f"{stack}.{first}" if first == last else f"{stack}.{first}-{last}"
            for figure, worst in LOGGED.items():
                candidates = [row for row in group if _is_number(row.get(figure))]
                if candidates:
                    pick = max if worst == "largest" else min
                    row = pick(candidates, key=lambda row: row[figure])
                    logged[f"routers/{name}/{figure}"] = float(row[figure])
                    logged[f"routers/{name}/{figure}_layer"] = row["layer"]
    return logged


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _attended(
    ids: Int[torch.Tensor, "sequences tokens"], named: dict[str, Any], model: Any
) -> torch.Tensor | None:
    """0 where a token is padding, None where none is.

    The attention mask says so. Where there is none, padding are those tokens that bear no label and
    are the padding token of the model.
    """
    mask, labels = named.get("attention_mask"), named.get("labels")
    if mask is not None and mask.shape == ids.shape:
        return mask
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    if labels is None or labels.shape != ids.shape or pad is None:
        return None
    return ~((labels == _NO_LABEL) & (ids == pad))


#: The label of tokens that have no part in the loss.
_NO_LABEL = -100


def _begins_document(
    positions: Int[torch.Tensor, "sequences tokens"],
) -> Bool[torch.Tensor, "sequences tokens"]:
    """Whether a token is the first of its sequence, or of a document packed into it."""
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return torch.nn.functional.pad(~follows, (1, 0), value=True)


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a part of it runs compiled code: no hook that comes later is called."""
    is_wrapped = any(type(part).__name__ == "OptimizedModule" for part in model.modules())
    return is_wrapped or any(getattr(part, "_compiled_call_impl", None) for part in model.modules())
