"""The weights of the experts beside a router: found by headers, read expert by expert."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moegeom.checkpoint.dtypes import as_array, numpy_dtype
from moegeom.checkpoint.formats.gguf import BLOCK_DTYPES, GGML_TYPES, decode
from moegeom.checkpoint.store import TensorInfo, TensorStore
from moegeom.core.errors import RouterError
from moegeom.core.router import Router
from moegeom.core.shapes import Float, Float32, Shaped
from moegeom.core.text import number_of
from moegeom.geometry.experts import Neurons, affine, neurons
from moegeom.router.expert_names import (
    LAYER,
    LEAVES,
    SHARED,
    SPELLINGS,
    LayerNames,
    layer_names,
    parted,
)
from moegeom.router.family import ExpertsSpec, Setting, TensorName, families, load_family
from moegeom.router.plain_names import plain_name, with_plain_names
from moegeom.router.settings import Settings
from moegeom.router.storage import Stored, find_storage

#: Matrices whose even rows are the gate, whatever the family.
_ALTERNATING = frozenset({"w13_weight"})

#: Numbers of a matrix that are decoded and multiplied at a time.
_AT_ONCE = 2**21

_BIAS = frozenset({"bias", "_bias"})

#: Keys of a config that hold the name of the activation.
_ACTIVATION = Setting(
    ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function",
          "dense_act_fn", "ffn_act_fn.name")
)  # fmt: skip
#: Tables of a config in which settings of experts stand.
CONFIG_ROOTS = ("", "text_config", "language_config", "llm_config", "thinker_config.text_config",
          "ffn_config")  # fmt: skip


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One expert: down · (act(gate y + gate_bias) * (up y + up_bias)) + down_bias.

    Without ``up`` the product is left out: ``gate`` is the only first matrix then.
    """

    gate: Float32[np.ndarray, "neurons hidden"]
    up: Float32[np.ndarray, "neurons hidden"] | None
    down: Float32[np.ndarray, "hidden neurons"]
    gate_bias: Float32[np.ndarray, "neurons"] | None
    up_bias: Float32[np.ndarray, "neurons"] | None
    down_bias: Float32[np.ndarray, "hidden"] | None


@dataclass(frozen=True)
class _Tensor:
    """One matrix of all experts: of each by its number, or of all in one.

    ``infos`` are those of one expert by the part behind the module's path. ``names`` are the
    tensors in which they lie, of each expert where they are numbered; ``stacked`` are those of all,
    ``num_stacked`` experts.
    """

    stored: Stored
    names: Mapping[int, Mapping[str, str]] | None
    stacked: Mapping[str, str]
    is_transposed: bool
    num_stacked: int = 0

    @property
    def num_bands(self) -> int:
        """Into how many runs of rows it parts that share no number and lie in one run of bytes."""
        infos = self.stored.tensors
        is_apart = self.names is not None and not self.is_transposed
        if not is_apart or any(i.dtype in BLOCK_DTYPES or not i.shape for i in infos):
            return 1
        num, most = math.gcd(*(i.shape[0] for i in infos)), max(i.shape[0] for i in infos)
        # rows of a block that is cut off at the end may be as many as of no block
        heights = [most // i.shape[0] for i in infos]
        return num if all(height & (height - 1) == 0 for height in heights) else 1


@dataclass(frozen=True, eq=False)
class ExpertTensors:
    """The experts of one router, before any byte of them is read.

    The activation of ``neurons`` is the name that the config (or the family) gives it, empty where
    neither does.
    """

    store: TensorStore
    router: str
    num_experts: int
    hidden: int
    width: int
    is_gated: bool
    neurons: Neurons
    is_interleaved: bool
    first: tuple[_Tensor, ...]
    last: _Tensor
    first_biases: tuple[_Tensor | None, ...]
    last_bias: _Tensor | None

    @property
    def activation(self) -> str:
        return self.neurons.activation

    @property
    def num_values(self) -> int:
        """Numbers in the matrices of one expert."""
        return self.hidden * self.width * (3 if self.is_gated else 2)

    def bytes_of(self, experts: Iterable[int] | None = None, *, gate_alone: bool = False) -> int:
        """What ``read`` (or ``read_gate``) of these experts reads, of all for None."""
        num = self.num_experts if experts is None else len(set(experts))
        pairs = tuple(zip(self.first, self.first_biases, strict=True))
        if gate_alone:
            pairs = pairs[:1]
        else:
            pairs += ((self.last, self.last_bias),)
        tensors = (tensor for pair in pairs for tensor in pair if tensor is not None)
        return num * sum(info.size_bytes for tensor in tensors for info in tensor.stored.tensors)

    def read(self, expert: int) -> ExpertWeights:
        """One expert in float32.

        Raises
        ------
        RouterError
            Where values are not finite, or a scale contradicts them.
        """
        (gate, gate_bias), *rest = self._first(expert, len(self.first))
        up, up_bias = rest[0] if rest else (None, None)
        down, down_bias = self._pair(self.last, self.last_bias, expert)
        return ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def output(
        self, expert: int, inputs: Float[np.ndarray, "tokens hidden"]
    ) -> Float[np.ndarray, "tokens hidden"]:
        """What :func:`~moegeom.geometry.experts.expert_output` makes of an expert, no matrix of
        which is in memory as a whole; raises as ``read``.
        """
        pairs = zip(self.first, self.first_biases, strict=True)
        first = [self._product(expert, inputs, *pair) for pair in pairs]
        if self.is_gated and len(first) == 1:
            first = [first[0][:, rows] for rows in self._halves]
        gate, up = (*first, None)[:2]
        assert gate is not None
        return self._product(expert, neurons(gate, up, self.neurons), self.last, self.last_bias)

    def _product(
        self,
        expert: int,
        inputs: Float[np.ndarray, "tokens width"],
        tensor: _Tensor,
        bias: _Tensor | None,
    ) -> Float[np.ndarray, "tokens outputs"]:
        num, size = tensor.num_bands, math.prod(tensor.stored.shape)
        some = max(num * _AT_ONCE // size, 1)
        if some < num:
            bands = (range(start, min(start + some, num)) for start in range(0, num, some))
            parts = (self._band(tensor, expert, one) for one in bands)
        else:
            parts = [self._pair(tensor, None, expert)[0]]
        outputs = np.hstack([affine(inputs, part, None) for part in parts])
        if bias is not None:
            outputs += self._values(bias, expert).reshape(-1)
        return outputs

    @property
    def gate_bands(self) -> int:
        """Into how many runs of neurons the gate parts that share no number: 1 where it lies on its
        side, with others, or in blocks that are decoded as they are read.
        """
        return 1 if self.is_gated and len(self.first) == 1 else self.first[0].num_bands

    def read_gate(
        self, expert: int, bands: Sequence[int] | None = None
    ) -> tuple[Float32[np.ndarray, "neurons hidden"], Float32[np.ndarray, "neurons"] | None]:
        """The matrix whose outputs the activation is of, and its bias; raises as ``read``.

        Where gate and up are one matrix, both are read; of ``gate_bands`` those named alone.
        """
        if bands is None or self.gate_bands == 1:
            return self._first(expert, 1)[0]
        bias, width = self.first_biases[0], self.width // self.gate_bands
        rows = np.concatenate([np.arange(band * width, (band + 1) * width) for band in bands])
        added = None if bias is None else self._values(bias, expert).reshape(-1)[rows]
        return self._band(self.first[0], expert, bands), added

    def _band(
        self, tensor: _Tensor, expert: int, bands: Sequence[int]
    ) -> Float32[np.ndarray, "rows columns"]:
        """Some bands of a matrix, in one read where they are a range."""
        names, num = tensor.names, tensor.num_bands
        assert names is not None
        runs = [(bands[0], len(bands))] if isinstance(bands, range) else [(b, 1) for b in bands]
        infos, values = {}, {}
        for key, name in names[expert].items():
            info = self.store.info(name)
            size, shape = (
                info.size_bytes // num,
                (len(bands) * info.shape[0] // num, *info.shape[1:]),
            )
            read = (self.store.read_bytes(name, band * size, many * size) for band, many in runs)
            raw = b"".join(read)
            infos[key] = replace(info, shape=shape, size_bytes=len(raw))
            values[key] = as_array(raw, numpy_dtype(info.dtype, info.file), shape, info.file)
        part = find_storage(infos, Settings(self.store.config), self.router).decode(values)
        return self._finite(part.astype(np.float32, copy=False), names[expert], expert)

    def _first(self, expert: int, number: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """The gate, and the up matrix if there is one: parted, where they are stored as one."""
        pairs = zip(self.first[:number], self.first_biases, strict=False)
        matrices = [self._pair(tensor, bias, expert) for tensor, bias in pairs]
        if not self.is_gated or len(self.first) == 2:
            return matrices
        ((both, bias),) = matrices
        return [
            (np.ascontiguousarray(both[rows]), None if bias is None else bias[rows])
            for rows in self._halves
        ]

    @property
    def _halves(self) -> tuple[slice, slice]:
        """Rows of gate and of up where they are one matrix."""
        if self.is_interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(self.width), slice(self.width, None)

    def _pair(
        self, tensor: _Tensor, bias: _Tensor | None, expert: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        values = self._values(tensor, expert)
        matrix = np.ascontiguousarray(values.T if tensor.is_transposed else values)
        return matrix, None if bias is None else self._values(bias, expert).reshape(-1)

    def _values(self, tensor: _Tensor, expert: int) -> Float32[np.ndarray, "..."]:
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"expert {expert} of {self.num_experts}")
        keys = tensor.stacked if tensor.names is None else tensor.names[expert]
        part = None if tensor.names is not None else (expert, tensor.num_stacked)
        stored_names = {info.name for info in tensor.stored.tensors}
        values = {
            key: _read(self.store, self.store.info(name), part)
            for key, name in keys.items()
            if (tensor.stacked if tensor.names is None else tensor.names[0])[key] in stored_names
        }
        numbers = tensor.stored.decode(values).astype(np.float32, copy=False)
        return self._finite(numbers, keys, expert)

    def _finite(
        self, numbers: Float32[np.ndarray, "..."], keys: Mapping[str, str], expert: int
    ) -> Float32[np.ndarray, "..."]:
        # where the squares overflow the closer look finds nothing
        if not np.isfinite(np.vdot(numbers, numbers)) and not np.isfinite(numbers).all():
            raise RouterError(
                f"{self.store.label}: tensor '{next(iter(keys.values()))}' holds values of expert "
                f"{expert} that are not finite."
            )
        return numbers


def experts_spec(router: Router) -> ExpertsSpec:
    """What the family says of its experts; nothing for a family that is described."""
    name = router.provenance.family
    stacks = load_family(name).stacks if name in families() else ()
    names = {(s.name, s.slot): s.experts for s in stacks}
    # modules that predict further tokens are copies of the layers
    names |= {("mtp", s.slot): s.experts for s in stacks if s.mtp_layers or s.mtp_from}
    return names.get((router.stack, router.slot), ExpertsSpec())


def experts_settings(store: TensorStore, router: Router) -> Settings:
    """The config as the layer of a router sees it."""
    return Settings(store.config, CONFIG_ROOTS).at(router.layer)


def open_experts(
    store: TensorStore,
    router: Router,
    of_router_inputs: bool = True,
    names: LayerNames | None = None,
) -> ExpertTensors:
    """The experts beside a router by names, headers and config; reads no values.

    ``names`` are the ``layer_names`` of a store that has plain ones, where they are there already.

    With ``of_router_inputs`` every expert has tensors and reads what the router reads, or it is an
    error; without, those that copy their input are left out, and what is read may be a projection
    of the router input or another norm of the same state.

    Experts are tensors of their own (``experts.<number>.gate_proj.weight``), or one tensor for all
    of them; gate and up may be one matrix, and a matrix may lie on its side: shapes say it, and
    the family where gate and up alternate.

    Raises
    ------
    RouterError
        If the checkpoint has no experts beside this router, their shapes contradict each other or
        the router, or they are stored in a way that is not known.
    """
    if names is None:
        names = layer_names((store := with_plain_names(store)).names())
    spec, settings = experts_spec(router), experts_settings(store, router)
    if spec.not_a_function:
        raise RouterError(
            f"{store.label}: the experts of router {router.name} are not looked at: "
            f"{spec.not_a_function}."
        )
    if of_router_inputs and spec.gain:
        raise RouterError(
            f"{store.label}: the experts of router {router.name} read another norm of the state "
            "that the router norms for itself.",
            "What they make of router inputs is not known here.",
        )
    query = _ExpertQuery(store, router, spec, settings, of_router_inputs)
    groups = _groups(names, router)
    for first, last in SPELLINGS:
        for tensors in groups:
            if {*first, last} <= tensors.keys():
                return _opened(query, tensors, first, last)
    raise RouterError(
        f"{store.label}: there are no tensors of experts beside router {router.name}.",
        "A file of routers alone has none; pass the whole checkpoint.",
    )


def has_shared_experts(store: TensorStore, router: Router) -> bool:
    """Whether the layer of a router has experts that run for every token, by their names."""
    store, (start, _) = with_plain_names(store), layer_of(router)
    return any(
        name.startswith(start) and SHARED.search(name.removeprefix(start)) for name in store.names()
    )


def read_beside(
    store: TensorStore, router: Router, names: Sequence[TensorName]
) -> Float32[np.ndarray, "*shape"]:
    """A tensor of the layer of a router, by the first of the family's patterns that is there.

    Raises
    ------
    RouterError
        Where none is, where it has a bias beside it, and where values are not finite.
    """
    store, (start, _) = with_plain_names(store), layer_of(router)
    present = set(store.names())
    candidates = [start + pattern.name.partition("{layer}.")[2] for pattern in names]
    name = next((name for name in candidates if name in present), None)
    if name is None:
        raise RouterError(
            f"{store.label}: tensor '{candidates[0]}' is missing, which stands between router "
            f"{router.name} and its experts.",
            "Is a shard missing? A file of routers alone has no experts.",
        )
    stem = name.removesuffix(".weight")
    if f"{stem}.bias" in present:
        raise RouterError(
            f"{store.label}: '{stem}.bias' stands between router {router.name} and its experts; "
            "blocks with such a bias are not known."
        )
    return read_module(store, stem)


def read_module(store: TensorStore, stem: str) -> Float32[np.ndarray, "*shape"]:
    """The weight ``<stem>.weight``, decoded with what is stored beside it; without its bias.

    Raises
    ------
    RouterError
        Where it is stored in a way that is not known, or holds values that are not finite.
    """
    beside = {
        name.removeprefix(f"{stem}."): name for name in store.names() if name.startswith(f"{stem}.")
    }
    infos = {key: store.info(name) for key, name in beside.items() if key != "bias"}
    stored = find_storage(
        infos, Settings(store.config), f"'{stem}'", read=lambda key: store.read(beside[key])
    )
    stored_names = {info.name for info in stored.tensors}
    values = {key: store.read(i.name) for key, i in infos.items() if i.name in stored_names}
    weight = stored.decode(values).astype(np.float32, copy=False)
    if not np.isfinite(weight).all():
        raise RouterError(f"{store.label}: '{stem}' holds values that are not finite.")
    return weight


def layer_of(router: Router) -> tuple[str, str]:
    """How the names of the tensors of its layer begin, and the name of its own weight."""
    own = plain_name(router.provenance.tensors[0])
    layer = LAYER.match(own)
    return layer[0] if layer else "", own


#: A module of experts: its folder, without the number of the expert, and its leaf.
_MODULE = re.compile(rf"((?:.*?\.)?)(?:experts\.(?:expert_)?{{}}\.)?({'|'.join(LEAVES)})")

#: Tensors by leaf, then by expert (-1: of all of them), then by the part behind the leaf.
_Group = dict[str, dict[int, dict[str, str]]]


def _groups(names: LayerNames, router: Router) -> list[_Group]:
    """Tensors of the layer by their folder; that of the router comes first."""
    start, own = layer_of(router)
    layers = [names.get(start, {})] if start else names.values()
    groups: dict[str, _Group] = {}
    for alike, by_expert in sorted(pair for layer in layers for pair in layer.items()):
        module, part = parted(alike[len(start) :])
        match = _MODULE.fullmatch(module)
        if match is None or SHARED.search(module):
            continue
        folder, leaf = match.groups()
        by_number = groups.setdefault(folder, {}).setdefault(leaf, {})
        for expert, name in by_expert.items():
            by_number.setdefault(expert, {})[part.removesuffix("{}")] = name

    def common(folder: str) -> int:
        name = start + folder
        return next((i for i, (a, b) in enumerate(zip(name, own, strict=False)) if a != b), 10**6)

    # "self_attention.experts." is not beside "mlp.router"
    return [groups[folder] for folder in sorted(groups, key=lambda f: (-common(f), f))]


@dataclass(frozen=True, eq=False)
class _ExpertQuery:
    """The router whose experts are looked for, and what family and config say of them."""

    store: TensorStore
    router: Router
    spec: ExpertsSpec
    settings: Settings
    of_router_inputs: bool

    @property
    def num_experts(self) -> int:
        """Experts with tensors."""
        is_given = not self.of_router_inputs and self.settings.has(self.spec.copies)
        return self.router.num_experts - (
            self.settings.integer(self.spec.copies) if is_given else 0
        )

    @property
    def first(self) -> int:
        """The number of the tensors of expert 0."""
        return self.spec.lot * self.num_experts

    @property
    def hidden(self) -> int:
        """The width of what the experts read."""
        latent = self.spec.latent
        if latent and not self.of_router_inputs and self.settings.has(latent.width):
            return self.settings.integer(latent.width)
        return self.router.hidden_size


def _opened(query: _ExpertQuery, tensors: _Group, first: Sequence[str], last: str) -> ExpertTensors:
    store, router, spec, hidden = query.store, query.router, query.spec, query.hidden
    matrices = {leaf: _tensor(query, leaf, tensors[leaf]) for leaf in (*first, last)}
    others = {leaf: _other_side(query, leaf, matrices[leaf].stored) for leaf in matrices}
    width = others[last]
    is_fused = len(first) == 1 and others[first[0]] == 2 * width
    if any(others[leaf] != (2 * width if is_fused else width) for leaf in first):
        sizes = ", ".join(f"{leaf} {matrices[leaf].stored.shape}" for leaf in matrices)
        raise RouterError(
            f"{store.label}: matrices of the experts of router {router.name} contradict each "
            f"other beside inputs of {hidden:,}: {sizes}."
        )
    turned = _turned(query, matrices, first, last)
    first_biases, last_bias = (
        tuple(_bias(query, leaf, tensors[leaf], others[leaf]) for leaf in first),
        _bias(query, last, tensors[last], hidden),
    )
    return ExpertTensors(
        store=store,
        router=router.name,
        num_experts=query.num_experts,
        hidden=hidden,
        width=width,
        is_gated=is_fused or len(first) == 2,
        neurons=neurons_of(spec, query.settings),
        is_interleaved=spec.interleaved or first[0] in _ALTERNATING,
        first=tuple(replace(matrices[leaf], is_transposed=turned[leaf]) for leaf in first),
        last=replace(matrices[last], is_transposed=turned[last]),
        first_biases=first_biases,
        last_bias=last_bias,
    )


def neurons_of(spec: ExpertsSpec, settings: Settings) -> Neurons:
    """How the neurons of an expert are made, by the family and the config."""
    return Neurons(
        activation=spec.activation or _activation(settings),
        limit=settings.bound(spec.limit),
        limits_activation=spec.limits_activation,
        slope=settings.number(spec.slope),
        gate_cap=settings.bound(spec.gate_cap),
        up_cap=settings.bound(spec.up_cap),
    )


def _activation(settings: Settings) -> str:
    if not settings.has(_ACTIVATION):
        return ""
    name = settings.get(_ACTIVATION)[1]
    return name.lower() if isinstance(name, str) else ""


def _tensor(query: _ExpertQuery, leaf: str, by_expert: Mapping[int, Mapping[str, str]]) -> _Tensor:
    """How a matrix is stored, and that every expert has one."""
    store, router, experts = query.store, query.router, query.num_experts
    parts = {e: _without_bias(leaf, rests) for e, rests in by_expert.items()}
    if -1 not in parts:
        own = {expert: parts[number] for expert, number in _numbers(query) if number in parts}
        # other lots stand beside, and shapes of experts that have no use for them
        is_alone = experts == router.num_experts and not _has_lots(router)
        if len(own) != experts or (is_alone and len(parts) != experts):
            raise RouterError(
                f"{store.label}: {number_of(len(parts), 'expert')} with a '{leaf}' beside router "
                f"{router.name}, which chooses among {router.num_experts}.",
                "Is a shard missing? Experts that copy their input have no tensors.",
            )
        infos = {key: store.info(name) for key, name in own[0].items()}
        return _Tensor(_storage(store, router, leaf, infos, None), own, {}, False)
    whole = {key: store.info(name) for key, name in parts[-1].items()}
    if all(info.shape[:1] == (router.num_experts,) for info in whole.values()):
        experts = router.num_experts  # experts that copy their input may have a place in it
    infos = {key: _slice(info, experts) for key, info in whole.items()}
    stored = _storage(store, router, leaf, infos, experts)
    return _Tensor(stored, None, parts[-1], False, experts)


def _numbers(query: _ExpertQuery) -> Iterator[tuple[int, int]]:
    """Each expert of the router, and the number that its tensors have."""
    return enumerate(range(query.first, query.first + query.num_experts))


def _has_lots(router: Router) -> bool:
    """Whether several routers of a layer number their experts in one row."""
    name = router.provenance.family
    stacks = load_family(name).stacks if name in families() else ()
    return any(stack.experts.lot for stack in stacks)


def _without_bias(leaf: str, rests: Mapping[str, str]) -> dict[str, str]:
    """``weight``, ``weight_scale``: the part behind the module, without the module's bias."""
    keys = ((rest, name) for rest, name in rests.items() if rest not in _BIAS)
    return {rest if rest[:1] not in ("", "_") else leaf + rest: name for rest, name in keys}


def _slice(info: TensorInfo, experts: int) -> TensorInfo:
    """What one expert has of a tensor of all of them: an axis of its own, or a run of rows."""
    shape = info.shape
    if shape[:1] == (experts,):
        shape = shape[1:]
    elif len(shape) == 2 and shape[0] % experts == 0:
        shape = (shape[0] // experts, shape[1])
    else:
        raise RouterError(
            f"{info.file}: tensor '{info.name}' has shape {info.shape}, expected {experts} experts."
        )
    return replace(info, shape=shape, size_bytes=info.size_bytes // experts)


def _storage(
    store: TensorStore,
    router: Router,
    leaf: str,
    infos: Mapping[str, TensorInfo],
    experts: int | None,
) -> Stored:
    def read(key: str) -> np.ndarray:
        return _read(store, store.info(infos[key].name), None if experts is None else (0, experts))

    plain = leaf if "weight" not in infos and any(k.startswith(leaf) for k in infos) else "weight"
    return find_storage(infos, Settings(store.config), f"experts of {router.name}", plain, read)


def _other_side(query: _ExpertQuery, leaf: str, stored: Stored) -> int:
    shape, hidden, router = stored.shape, query.hidden, query.router
    if len(shape) != 2 or hidden not in shape or 0 in shape:
        raise RouterError(
            f"{query.store.label}: '{leaf}' of an expert of router {router.name} has shape "
            f"{shape}; the router reads inputs of {hidden:,}.",
            "Experts that read a projection of it are not known.",
        )
    return shape[0] if shape[1] == hidden else shape[1]


def _turned(
    query: _ExpertQuery, matrices: Mapping[str, _Tensor], first: Sequence[str], last: str
) -> dict[str, bool]:
    """Which matrices lie on their side: by shape, those of square ones as the others do."""
    hidden, turned, square = query.hidden, {}, []
    for leaf, tensor in matrices.items():
        rows, columns = tensor.stored.shape
        if rows == columns:
            square.append(leaf)
        else:
            turned[leaf] = (rows if leaf in first else columns) == hidden
    # numbered experts are linear layers, (outputs, inputs); so are those of GGUF
    is_linear = all(t.names is not None or leaf.endswith("_exps") for leaf, t in matrices.items())
    if square and not turned and not is_linear:
        raise RouterError(
            f"{query.store.label}: '{last}' of the experts of router {query.router.name} is "
            "square: whether rows or columns are inputs cannot be told."
        )
    side = False if is_linear else next(iter(turned.values()), False)
    return turned | dict.fromkeys(square, side)


def _bias(
    query: _ExpertQuery, leaf: str, by_expert: Mapping[int, Mapping[str, str]], length: int
) -> _Tensor | None:
    store, router, experts = query.store, query.router, query.num_experts
    names = {
        expert: name
        for expert, number in ((-1, -1), *_numbers(query))
        for rest, name in by_expert.get(number, {}).items()
        if rest in _BIAS
    }
    if not names:
        return None
    is_stacked = -1 in names
    one = store.info(names[-1 if is_stacked else min(names)])
    info = _slice(one, experts) if is_stacked else one
    if info.shape != (length,) or not (is_stacked or set(names) == set(range(experts))):
        raise RouterError(
            f"{one.file}: tensor '{one.name}' has shape {one.shape}; the biases of the experts of "
            f"router {router.name} have {length:,} numbers each."
        )
    stored = find_storage({"weight": info}, Settings(store.config), f"experts of {router.name}")
    by_number = {expert: {"weight": name} for expert, name in names.items()}
    stacked = by_number.get(-1, {})
    return _Tensor(stored, None if is_stacked else by_number, stacked, False, experts)


def _read(
    store: TensorStore, info: TensorInfo, part: tuple[int, int] | None
) -> Shaped[np.ndarray, "..."]:
    """A tensor, or the part of one expert of so many; no other byte is read."""
    if part is None:
        return store.read(info.name)
    expert, experts = part
    one = _slice(info, experts)
    raw = store.read_bytes(info.name, expert * one.size_bytes, one.size_bytes)
    where = f"{info.file}: tensor '{info.name}'"
    if info.dtype in BLOCK_DTYPES:
        kind = next(kind for kind in GGML_TYPES.values() if kind.name == info.dtype)
        return decode(raw, kind, one.shape, where)
    return as_array(raw, numpy_dtype(info.dtype, where), one.shape, where)
