"""A running model as a checkpoint, where its routers are in it, and hooks that listen to them.

Names, rules and checks are those of a checkpoint on disk. Tensors of torch become NumPy arrays
without a copy where both can share the memory.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moegeom.checkpoint.open import open_checkpoint
from moegeom.checkpoint.store import TensorInfo
from moegeom.core.errors import CheckpointError, RecordingError
from moegeom.core.router import Router, RouterSet
from moegeom.core.shapes import Float, Shaped
from moegeom.core.text import number_of
from moegeom.router.expert_names import LAYER
from moegeom.router.expert_tensors import experts_spec
from moegeom.router.load import load_routers
from moegeom.router.plain_names import plain_name
from moegeom.router.requested_family import RequestedFamily

# ------------------------------------------------------------------------ the model as a checkpoint
#: Dtypes of torch in the spelling of safetensors.
STORED_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

#: Dtypes that NumPy has only by ml_dtypes: they cross over as integers of the same size.
_AS_INTEGERS: dict[torch.dtype, tuple[torch.dtype, type]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def as_array(tensor: torch.Tensor) -> Shaped[np.ndarray, "*shape"]:
    """The tensor's numbers in its dtype, by DLPack; a tensor of a device is copied to the host."""
    host = tensor.detach().cpu()
    if host.dtype in _AS_INTEGERS:
        integers, scalar = _AS_INTEGERS[host.dtype]
        return np.from_dlpack(host.contiguous().view(integers)).view(scalar)
    return np.from_dlpack(host)


class ModelStore:
    """Parameters and buffers of a model, by the names they would have without wrappers."""

    def __init__(self, model: torch.nn.Module, label: str = "the running model") -> None:
        self._label = label
        self._config = _config(model)
        named = (*model.named_parameters(), *model.named_buffers())
        self._own_names = {plain_name(name): name for name, _ in named}
        self._tensors = {plain_name(name): tensor for name, tensor in named}
        self._bytes_read = 0

    @property
    def label(self) -> str:
        return self._label

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_total(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @property
    def revision(self) -> str:
        return ""

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def own_name(self, name: str) -> str:
        """The parameter's name in this very model, wrappers included."""
        return self._own_names[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer itself."""
        return self._tensors[name]

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        dtype = STORED_NAMES.get(tensor.dtype, str(tensor.dtype))
        shape, size = tuple(tensor.shape), tensor.numel() * tensor.element_size()
        return TensorInfo(name, dtype, shape, self._label, 0, size)

    def read(self, name: str) -> Shaped[np.ndarray, "*shape"]:
        info, tensor = self.info(name), self._tensors[name]
        if tensor.is_meta or not tensor.numel():
            raise CheckpointError(
                f"{self._label}: parameter '{name}' holds no values here (shape "
                f"{list(info.shape)}, device {tensor.device}).",
                "It is sharded or offloaded: pass checkpoint=PATH, whose routers are the same.",
            )
        # A sharded tensor (DTensor) is gathered: every rank that has a part makes the same call.
        gather = getattr(tensor, "full_tensor", None)
        whole = tensor if gather is None else gather()
        self._bytes_read += info.size_bytes
        return np.ascontiguousarray(as_array(whole))

    def is_open(self, name: str) -> bool:
        """All are."""
        return name in self.names()

    def are_alike(self, names: Collection[str]) -> bool:
        return False

    def prepare(self, names: Iterable[str]) -> None:
        """Nothing: everything is open."""

    def read_many(self, names: Iterable[str]) -> Iterator[tuple[str, Shaped[np.ndarray, "*shape"]]]:
        for name in sorted(set(names)):
            yield name, self.read(name)

    def read_bytes(self, name: str, start: int, size: int) -> bytes:
        return self.read(name).tobytes()[start : start + size]


def _config(model: torch.nn.Module) -> Mapping[str, Any]:
    """The configuration of a model of transformers; empty for any other."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            return config.to_dict()
    return {}


# --------------------------------------------------------------------------------------------- taps
#: router name, inputs [tokens, hidden], the model's own choice [tokens, top_k] if it can be seen.
Deliver = Callable[[str, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, eq=False)
class Place:
    """Where a router may be listened to: the module with its weight, then those around it."""

    router: Router
    paths: tuple[str, ...]


def find_places(routers: Sequence[Router], store: ModelStore) -> tuple[Place, ...]:
    """The place of each router of ``store``, from the names of its tensors.

    Raises
    ------
    RecordingError
        When a router belongs to no module, or norms its own input.
    """
    weights = [store.own_name(router.provenance.tensors[0]) for router in routers]
    return tuple(
        _place(router, weight, [w for w in weights if w != weight], store)
        for router, weight in zip(routers, weights, strict=True)
    )


def _place(router: Router, weight: str, others: Sequence[str], store: ModelStore) -> Place:
    # a block with two routers reads tokens that one of them never sees
    paths = tuple(
        path
        for path in _around(weight)
        if not any(other.startswith(f"{path}.") for other in others)
    )
    if not paths:
        raise RecordingError(
            f"router {router.name}: its weight '{weight}' belongs to no module inside a layer, so "
            "that there is nothing to listen to.",
            "Record its inputs with moegeom.tokens.recording.writer.RecordingWriter.",
        )
    norm = router.norm.tensor if router.norm else ""
    if norm and store.own_name(norm).startswith(f"{paths[0]}."):
        raise RecordingError(
            f"router {router.name}: its module '{paths[0]}' norms its own input, so that the "
            "router's input cannot be seen from outside.",
            "Record the inputs of that norm (stage pre_norm) with RecordingWriter.",
        )
    return Place(router, paths)


def _around(tensor: str) -> Iterator[str]:
    """Modules around a tensor, innermost first, up to the layer, which reads something else."""
    path = tensor.rpartition(".")[0]
    while "." in path and not path.rpartition(".")[2].isdigit():
        yield path
        path = path.rpartition(".")[0]


class Tap:
    """Listens at one place while hooks are on; delivers once for each call of the block.

    Some modules are never called (their weight is used by the block around them), and some blocks
    choose what their router only scores. So the innermost module that is called gives the input,
    and the innermost whose result holds a choice gives that, once the outermost has returned.
    """

    def __init__(self, place: Place, model: torch.nn.Module, deliver: Deliver) -> None:
        self._place = place
        self._modules = [model.get_submodule(path) for path in place.paths]
        self._deliver = deliver
        self._running = 0
        self._input_depth: int | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}

    def hooks(self) -> Iterator[Any]:
        """Puts the hooks on; each handle takes one off."""
        for depth, module in enumerate(self._modules):
            yield module.register_forward_pre_hook(self._before(depth), with_kwargs=True)
            yield module.register_forward_hook(self._after(depth), always_call=True)

    def _before(self, depth: int) -> Callable[..., None]:
        def before(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._running += 1
            if self._input_depth not in (None, depth):
                return
            inputs = _first_floats((*arguments, *named.values()), self._place.router.hidden_size)
            if inputs is not None:
                # Blocks may change their input in place: what counts is what it is now.
                self._inputs[depth] = inputs.detach().reshape(-1, inputs.shape[-1]).clone()

        return before

    def _after(self, depth: int) -> Callable[..., None]:
        def after(module: Any, arguments: tuple[Any, ...], result: Any) -> None:
            self._running -= 1
            if result is not None and not self._chosen:
                self._choose(depth, result)
            if self._running == 0:
                self._finish(failed=result is None)

        return after

    @torch.no_grad()
    def _choose(self, depth: int, result: Any) -> None:
        block = self._modules[min(depth + 1, len(self._modules) - 1)]
        chosen = read_choice(self._modules[depth], block, result, self._place.router)
        if chosen is not None:
            self._chosen[depth] = chosen.detach().clone()

    def _finish(self, failed: bool) -> None:
        inputs, chosen = self._inputs, self._chosen
        self._inputs, self._chosen = {}, {}
        if failed or not inputs:
            return
        self._input_depth = min(inputs)
        choice = chosen[min(chosen)] if chosen else None
        self._deliver(self._place.router.name, inputs[self._input_depth], choice)


def _first_floats(values: tuple[Any, ...], width: int) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return value if value.shape[-1] == width else None
    return None


#: module, the module that holds it, its result, the router: experts [tokens, top_k], or None.
Reader = Callable[[torch.nn.Module, torch.nn.Module, Any, Router], torch.Tensor | None]


def read_choice(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """Experts [tokens, top_k] in the model's own order, or None where ``result`` holds none.

    ``block`` is the module that holds ``module``. Nothing is waited for: on a device the tensor
    may still be under way.
    """
    read = READERS.get(type(module).__name__, _listed_choice)
    return read(module, block, result, router)


def _listed_choice(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """The integers among the results: top_k for each token."""
    top_k = router.rule.top_k
    for tensor in _tensors(result):
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if is_integer and tensor.dtype != torch.bool and tensor.ndim and tensor.shape[-1] == top_k:
            return tensor.reshape(-1, top_k)
    return None


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
    elif isinstance(result, dict):
        yield from _tensors(tuple(result.values()))


def _dbrx(module: torch.nn.Module, block: Any, result: Any, router: Router) -> torch.Tensor | None:
    """The router gives logits; the choice is a method of its block."""
    _, chosen = block.route_tokens_to_experts(result.flatten(0, -2))
    return chosen.reshape(-1, router.rule.top_k)


def _jetmoe(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """The choices come sorted by expert: ``order`` says which slot each one was."""
    order, _, _, loads, _ = result
    experts = torch.repeat_interleave(torch.arange(len(loads)), torch.as_tensor(loads))
    chosen = torch.empty_like(order)
    chosen[order] = experts.to(order.device)
    return chosen.reshape(-1, router.rule.top_k)


def _llama4(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """One weight for every expert: 0 where it was not chosen."""
    return result[0].reshape(-1, router.num_experts).topk(router.rule.top_k).indices


def _after_capacity(
    module: torch.nn.Module, block: torch.nn.Module, result: Any, router: Router
) -> torch.Tensor | None:
    """What is given back lacks the tokens that full experts dropped: that is not the choice."""
    return None


#: By class of the module; all others list their choice among their results.
READERS: dict[str, Reader] = {
    "DbrxRouter": _dbrx,
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "NllbMoeTop2Router": _after_capacity,
    "SwitchTransformersTop1Router": _after_capacity,
}


@dataclass(frozen=True, eq=False)
class Identity:
    """The routers and where they are; ``fingerprint`` is that of ``checkpoint``, if one is named.

    ``routers`` are those of the checkpoint, which hold the same numbers as the model's; of the
    model itself where no checkpoint is named.
    """

    routers: RouterSet
    places: tuple[Place, ...]
    fingerprint: str
    checkpoint_name: str
    checkpoint: str
    _tensors: tuple[tuple[str, torch.Tensor, int], ...]

    def refuse_changed(self) -> None:
        """Raises RecordingError when a router has changed since the recording began."""
        for name, tensor, version in self._tensors:
            if tensor._version != version:
                raise RecordingError(
                    f"parameter '{name}' changed while its router was being recorded: the tokens "
                    "would belong to no single checkpoint.",
                    "Record between two optimiser steps, a recording for each.",
                )


def identify(
    model: torch.nn.Module, checkpoint: str | Path | None, family: RequestedFamily
) -> Identity:
    """The routers of ``model``, held against those of ``checkpoint``.

    Raises
    ------
    RouterError
        When the model's family is not known, or a router cannot be interpreted.
    RecordingError
        When the model's routers are not those of the checkpoint.
    """
    store = ModelStore(model)
    running = load_routers(store, requested_family=family)
    names = {name for router in running.routers for name in router.provenance.tensors}
    tensors = tuple((n, store.tensor(n), store.tensor(n)._version) for n in sorted(names))
    places = find_places(running.routers, store)
    if checkpoint is None:
        return Identity(running, places, "", "", running.checkpoint, tensors)
    stored = load_routers(open_checkpoint(checkpoint), requested_family=family)
    by_name = {router.name: router for router in stored.routers}
    for router in running.routers:
        _refuse_other(router, by_name.get(router.name), store, stored.checkpoint)
    return Identity(stored, places, stored.fingerprint, stored.checkpoint, str(checkpoint), tensors)


def holds_rows(
    stored: Float[np.ndarray, "experts hidden"],
    running: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> bool:
    """Whether ``running`` is ``stored``, rounded if need be to ``dtype``, or to its own."""
    rows = torch.tensor(stored)
    rounded = rows.to(dtype or running.dtype).to(rows.dtype)
    own = running.detach().cpu().to(rows.dtype)
    return torch.equal(rows, own) or torch.equal(rounded, own)


def _refuse_other(running: Router, stored: Router | None, store: ModelStore, label: str) -> None:
    """Raises RecordingError unless the rows agree, rounded to the model's precision if need be."""
    dtype = store.tensor(running.provenance.tensors[0]).dtype
    if stored is None:
        raise RecordingError(
            f"{label} has no router {running.name}; the running model has.",
            "Name the checkpoint that the model was loaded from.",
        )
    if holds_rows(stored.weight, torch.from_numpy(running.weight), dtype):
        return
    raise RecordingError(
        f"router {running.name} of the running model is not that of {label}.",
        "Name the checkpoint that the model was loaded from, or none.",
    )


#: The last part of the path of a module with shared experts; it holds no other such module.
_SHARED = re.compile(r"(?:.*\.)?shared?_(?:experts?|mlp)")

_ELSEWHERE = (
    "moegeom research outputs computes them from the checkpoint, on recorded router inputs."
)


class OutputTap:
    """Keeps what the block and the shared experts of one router gave, until it is taken.

    What the routed experts gave is the difference where shared experts run inside the block. Each
    expert on every token is asked of the module that holds the experts.

    Raises
    ------
    RecordingError
        When the block gives something else than the sum of its experts, or, for every expert, they
        cannot be asked one by one.
    """

    def __init__(self, place: Place, model: torch.nn.Module, kinds: Sequence[str]) -> None:
        self._router, self._kinds = place.router, kinds
        path = place.paths[-1]
        self._path, self._block = path, model.get_submodule(path)
        shared = _shared_path(model, path)
        _refuse_other_sums(place.router, path, bool(shared))
        self._is_inside = shared.startswith(f"{path}.")
        self._shared = model.get_submodule(shared) if shared else None
        self._gate = _child(model, f"{shared}_gate") if shared else None
        self._every = _every(place.router, self._block, path) if "expert_output" in kinds else None
        self._seen: dict[str, torch.Tensor] = {}

    def hooks(self) -> Iterator[Any]:
        """Puts the hooks on; each handle takes one off."""
        modules = {"block": self._block, "shared": self._shared, "gate": self._gate}
        for part, module in modules.items():
            if module is not None:
                yield module.register_forward_hook(self._after(part))

    def _after(self, part: str) -> Callable[..., None]:
        def after(module: Any, arguments: tuple[Any, ...], result: Any) -> None:
            if part not in self._seen:
                output = result[0] if isinstance(result, (tuple, list)) else result
                # blocks may add to what their shared experts gave, in place
                self._seen[part] = output.detach().clone()

        return after

    def every(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What each expert gives on each token, (tokens, experts, hidden); None unless asked."""
        return None if self._every is None else self._every(inputs)

    @torch.no_grad()
    def take(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Shared and routed output of the pass, one row for each token; forgets it."""
        seen, self._seen = self._seen, {}
        if "block" not in seen:
            raise RecordingError(
                f"router {self._router.name}: its block ('{self._path}') was not called as a "
                "module, so that there is nothing to listen to.",
                _ELSEWHERE,
            )
        total = self._rows(seen["block"], num_rows)
        shared = torch.zeros_like(total)
        if "shared" in seen:
            shared = self._rows(seen["shared"], num_rows)
            if "gate" in seen:
                shared = torch.sigmoid(seen["gate"].reshape(num_rows, -1)) * shared
        routed = total
        if self._is_inside and "shared" in seen:
            routed = (total.float() - shared.float()).to(total.dtype)
        return {"shared_output": shared.to(total.dtype), "routed_output": routed}

    def forget(self) -> None:
        """Of a pass that is not recorded."""
        self._seen = {}

    def _rows(self, values: torch.Tensor, num_rows: int) -> torch.Tensor:
        hidden = self._router.hidden_size
        if values.shape[-1:] != (hidden,) or values.numel() != num_rows * hidden:
            raise RecordingError(
                f"router {self._router.name}: its block gives {list(values.shape)}; expected "
                f"{number_of(num_rows, 'token')} of {hidden}.",
                _ELSEWHERE,
            )
        return values.reshape(num_rows, hidden)


def _refuse_other_sums(router: Router, path: str, has_shared: bool) -> None:
    spec = experts_spec(router)
    why = spec.not_a_function or spec.behind
    if has_shared and spec.factor_beside_shared.value != 1.0:
        why = "it may be the mean of shared and routed experts"
    if why:
        raise RecordingError(
            f"router {router.name}: its block ('{path}') does not give the sum of its experts: "
            f"{why}.",
            _ELSEWHERE,
        )


def _shared_path(model: torch.nn.Module, block: str) -> str:
    """The module with the shared experts of the layer; empty where there is none."""
    layer = LAYER.match(f"{block}.")
    start = layer[0] if layer else f"{block}."
    paths = [
        path
        for path, _ in model.named_modules()
        if path.startswith(start) and _SHARED.fullmatch(path)
    ]
    return min(paths, key=len, default="")


def _child(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _every(
    router: Router, block: torch.nn.Module, path: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Asks the module with the experts: tokens, an expert for each, weights of 1."""
    experts = _child(block, "experts")
    names = [] if experts is None else [*inspect.signature(experts.forward).parameters]
    spec = experts_spec(router)
    if (
        experts is None
        or len(names) != 3
        or spec.latent
        or isinstance(experts, torch.nn.ModuleDict)
    ):
        raise RecordingError(
            f"router {router.name}: experts of its block ('{path}') cannot be asked one by one.",
            _ELSEWHERE,
        )

    @torch.no_grad()
    def every(inputs: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device)
        outputs = [
            experts(inputs, torch.full_like(ones, expert, dtype=torch.int64), ones)
            for expert in range(router.num_experts)
        ]
        return torch.stack([one.reshape(inputs.shape) for one in outputs], dim=1)

    return every
