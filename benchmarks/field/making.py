"""Makes a member of the field: sparse files with real headers, and recordings of two routers.

Routers have spectra as trained ones have them: rows lean to a common mean and share directions with
the tokens, of weights that fall with their rank. The experts of one layer are there, tiled from 64
blocks and told apart by a scale each; those of the other layers are holes, which read as zeros.

    python -m benchmarks.field.making OLMoE-1B-7B FOLDER

leaves ``model``, ``model_b`` (a changed router in one layer, the other files being links), both
again as ``step_1`` and ``step_2``, ``rec`` of one layer, ``rec_a`` (its first tokens) and ``rec_b``
(these with the noise of bfloat16), ``collapsed`` of the layer whose rows all point one way, and
``trace.npy`` [tokens, layers, k] of all routers.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.field.members import EXPERT, MEMBERS, SIZES, Member, Tensor, size_of

#: Directions that rows and tokens share, and the power of their rank by which weights fall.
NUM_DIRECTIONS, FALL = 64, 0.5

#: Spread of the logits of a router, about.
SPREAD = 3.0

#: What tells the rows of a collapsed router apart, over what they have in common.
APART = 0.02

#: The equal rows of a collapsed router.
EQUAL = (1, 5)

#: Blocks that experts are tiled from, and numbers in each.
NUM_BLOCKS, BLOCK = 64, 1 << 16

#: Tokens of a document, domains, and how many times as long as others the first token is.
DOCUMENT, DOMAINS, OUTLIER = 256, ("web", "code", "mathematics"), 1000.0

#: Tokens recorded of B at most, at the collapsed router, in the trace, and in a shard.
NUM_B, NUM_COLLAPSED, NUM_TRACED, SHARD = 16_384, 4096, 512, 8192

#: Noise of the inputs of run B over their rms: two roundings to bfloat16.
NOISE = 0.0035

_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
}


def _generator(*of: str | int) -> np.random.Generator:
    """The same numbers for the same words."""
    return np.random.default_rng(
        [one if isinstance(one, int) else zlib.crc32(one.encode()) for one in of]
    )


def _directions(member: Member) -> np.ndarray:
    """Unit vectors that rows and tokens share, times weights whose squares add up to 1."""
    shape = (NUM_DIRECTIONS, member.hidden)
    unit = _generator("directions", member.name).standard_normal(shape, np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    weights = np.arange(1, NUM_DIRECTIONS + 1) ** -FALL
    return unit * (weights / np.linalg.norm(weights)).astype(np.float32)[:, None]


def _unit(member: Member, *of: str | int) -> np.ndarray:
    row = _generator(member.name, *of).standard_normal(member.hidden, np.float32)
    return row / np.linalg.norm(row)


def router_rows(member: Member, layer: int, run: str = "a") -> np.ndarray:
    """Rows of a router; ``run`` b has another one in the changed layer."""
    seeds = ("rows", member.name, layer, run if layer == member.changed else "a")
    generator = _generator(*seeds)
    shape = (member.num_experts, member.hidden)
    own = generator.standard_normal(shape, np.float32) / np.float32(np.sqrt(member.hidden))
    mean = _unit(member, "mean of rows", layer)
    if layer == member.collapsed:
        rows = mean + np.float32(APART) * own
        rows[EQUAL[1]] = rows[EQUAL[0]]
    else:
        shared = generator.standard_normal((member.num_experts, NUM_DIRECTIONS), np.float32)
        rows = 0.5 * mean + shared @ _directions(member) + 0.5 * own
        rows *= np.exp(0.15 * generator.standard_normal((member.num_experts, 1), np.float32))
    return rows * np.float32(SPREAD / np.sqrt(member.hidden))


def token_inputs(member: Member, layer: int, first: int, num: int) -> np.ndarray:
    """Tokens before the gain, of rms 1: a mean, a domain, a document and their own."""
    document = np.arange(first, first + num) // DOCUMENT
    own = _generator("tokens", member.name, layer, first)
    factors = 0.7 * own.standard_normal((num, NUM_DIRECTIONS), np.float32)
    for kind, of in (("domain", document % len(DOMAINS)), ("document", document)):
        for one in np.unique(of):
            of_kind = _generator(kind, member.name, int(one))
            factors[of == one] += 0.5 * of_kind.standard_normal(NUM_DIRECTIONS, np.float32)
    rows = own.standard_normal((num, member.hidden), np.float32)
    rows *= np.float32(0.6 / np.sqrt(member.hidden))
    rows += factors @ _directions(member)
    rows += np.float32(0.4) * _unit(member, "mean of tokens")
    rows *= np.sqrt(np.float32(member.hidden)) / np.linalg.norm(rows, axis=1, keepdims=True)
    if first == 0:
        rows[0, 2:] *= np.float32(0.01)
        rows[0] *= np.float32(OUTLIER * np.sqrt(member.hidden)) / np.linalg.norm(rows[0])
    return rows


@dataclass
class _Blocks:
    """What experts are tiled from, by dtype, and scaled for the expert that is written."""

    blocks_by_dtype: dict[str, np.ndarray] = field(default_factory=dict)
    scaled: tuple[tuple[str, int], np.ndarray] | None = None

    def of(self, dtype: str, expert: int, num_experts: int) -> np.ndarray:
        """Blocks of bytes: bfloat16 is scaled, numbers of one byte have scales beside them."""
        if self.scaled is None or self.scaled[0] != (dtype, expert):
            if dtype not in self.blocks_by_dtype:
                self.blocks_by_dtype[dtype] = _drawn_blocks(dtype)
            blocks = self.blocks_by_dtype[dtype]
            if dtype == "BF16":
                blocks = (blocks * np.float32(scale_of(expert, num_experts))).astype(_DTYPES[dtype])
            self.scaled = ((dtype, expert), blocks.view(np.uint8).reshape(NUM_BLOCKS, -1))
        return self.scaled[1]


def scale_of(expert: int, num_experts: int) -> float:
    """From 0.75 to 1.25."""
    return 0.75 + 0.5 * (expert + 1) / (num_experts + 1)


def _drawn_blocks(dtype: str) -> np.ndarray:
    generator = _generator("blocks", dtype)
    if dtype == "U8":
        return generator.integers(0, 256, (NUM_BLOCKS, BLOCK), np.uint8)
    numbers = generator.standard_normal((NUM_BLOCKS, BLOCK), np.float32)
    return numbers * np.float32(0.02) if dtype == "BF16" else numbers.astype(_DTYPES[dtype])


def _tiles(blocks: np.ndarray, size: int, generator: np.random.Generator) -> Iterator[bytes]:
    """``size`` bytes of blocks in an order of their own."""
    while size > 0:
        for block in generator.permutation(len(blocks)):
            if size <= 0:
                return
            yield blocks[block][:size].tobytes()
            size -= blocks.shape[1]


@dataclass
class _Maker:
    """Writes the files of one checkpoint."""

    member: Member
    run: str
    blocks: _Blocks = field(default_factory=_Blocks)

    def write_file(self, path: Path, content: Iterable[Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape in content:
            end = offset + size_of((name, dtype, shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in content:
                start = 8 + len(text) + header[tensor[0]]["data_offsets"][0]
                for at, part in self._parts(tensor):
                    file.seek(start + at)
                    file.write(part)
            file.truncate(8 + len(text) + offset)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[int, bytes]]:
        """What is there of a tensor: offset and bytes."""
        name, dtype, shape = tensor
        values = self._values(name, dtype, shape)
        if values is not None:
            yield 0, values.astype(_DTYPES[dtype]).tobytes()
            return
        if not name.startswith(f"model.layers.{self.member.recorded}."):
            return
        if EXPERT.search(name) or "shared_experts" in name:
            number = EXPERT.search(name)
            yield from self._expert(tensor, int(number[1]) if number else -1, shape, 0)
        elif ".experts." in name:  # all of them in one tensor
            size = size_of(tensor) // shape[0]
            for expert in range(shape[0]):
                yield from self._expert(tensor, expert, shape[1:], expert * size)

    def _values(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """The numbers of routers and of what has one axis; None for matrices."""
        generator = _generator(self.member.name, name)
        numbers = generator.standard_normal(shape, np.float32) if len(shape) == 1 else None
        if name.endswith(f".{self.member.router}.weight"):
            return router_rows(self.member, int(name.split(".")[2]), self.run)
        if numbers is None:
            return None
        if name.endswith(("e_score_correction_bias", "router.bias")):
            numbers *= 0.02
            if int(name.split(".")[2]) == self.member.collapsed:
                numbers[EQUAL[1]] = numbers[EQUAL[0]]
            return numbers
        if name.endswith("norm.weight"):
            return 1 + 0.1 * numbers
        return numbers if name.endswith("sinks") else 0.01 * numbers

    def _expert(
        self, tensor: Tensor, expert: int, shape: tuple[int, ...], offset: int
    ) -> Iterator[tuple[int, bytes]]:
        name, dtype, _ = tensor
        scale, generator = scale_of(expert, self.member.num_experts), _generator(name, expert + 1)
        if name.endswith("_scale_inv"):
            numbers = np.full(shape, 0.02 * scale, np.float32)
            yield offset, numbers.tobytes()
        elif name.endswith("_scales"):  # powers of two above 2^-127, for four-bit floats up to 6
            yield offset, generator.integers(118, 121, shape, np.uint8).tobytes()
        else:
            numbers = int(np.ceil(shape[0] * self.member.share)) * int(np.prod(shape[1:]))
            blocks = self.blocks.of(dtype, expert, self.member.num_experts)
            for part in _tiles(blocks, numbers * SIZES[dtype], generator):
                yield offset, part
                offset += len(part)


def write_checkpoint(folder: Path, member: Member) -> None:
    """All of its files."""
    folder.mkdir(parents=True)
    files = member.files()
    maker = _Maker(member, "a")
    for name, content in files.items():
        maker.write_file(folder / name, content)
    sizes = sum(size_of(tensor) for content in files.values() for tensor in content)
    index = {
        "metadata": {"total_size": sizes},
        "weight_map": {t[0]: name for name, content in files.items() for t in content},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")
    (folder / "config.json").write_text(json.dumps(dict(member.config), indent=2), "utf-8")


def write_b(folder: Path, a: Path, member: Member) -> None:
    """The same with another router in one layer: links but for the file that holds it."""
    folder.mkdir()
    router = f"model.layers.{member.changed}.{member.router}.weight"
    files = member.files()
    for file in a.iterdir():
        if router in {tensor[0] for tensor in files.get(file.name, ())}:
            _Maker(member, "b").write_file(folder / file.name, files[file.name])
        else:
            os.link(file, folder / file.name)


def write_recordings(folder: Path, member: Member) -> None:
    """Of the layer whose experts are there, of two runs, and of the collapsed one."""
    from moegeom.checkpoint.open import open_checkpoint
    from moegeom.router.load import load_routers

    routers = load_routers(open_checkpoint(folder / "model"))
    by_layer = {router.layer: router for router in routers.routers}
    of_b = load_routers(open_checkpoint(folder / "model_b")).fingerprint
    num_b = min(member.num_tokens // 2, NUM_B)
    for name, layer, num_tokens, noise, fingerprint in (
        ("rec", member.recorded, member.num_tokens, 0.0, routers.fingerprint),
        ("rec_a", member.recorded, num_b, 0.0, routers.fingerprint),
        ("rec_b", member.recorded, num_b, NOISE, of_b),
        ("collapsed", member.collapsed, NUM_COLLAPSED, 0.0, routers.fingerprint),
    ):
        facts = {"checkpoint_name": member.name, "fingerprint": fingerprint}
        _record(folder / name, member, by_layer[layer], num_tokens, noise, facts)
    inputs = token_inputs(member, 0, DOCUMENT, NUM_TRACED)
    chosen = []
    for _, router in sorted(by_layer.items()):
        logits = (inputs * router.gain) @ router.weight.T.astype(np.float32)
        order = np.argsort(-logits, axis=1, kind="stable")
        chosen.append(order[:, : member.top_k].astype(np.int32))
    np.save(folder / "trace.npy", np.stack(chosen, axis=1))


def _record(
    path: Path, member: Member, router: object, num_tokens: int, noise: float, facts: Mapping
) -> None:
    from moegeom.core.router import Router
    from moegeom.core.tokens import TokenColumns
    from moegeom.engine.choice import chosen_by, logits_of
    from moegeom.engine.prepared import prepare
    from moegeom.kernels.table import load_kernels
    from moegeom.tokens.recording.writer import RecordingWriter

    assert isinstance(router, Router)
    prepared, kernels = prepare(router), load_kernels("cpu")
    texts = {**facts, "engine": "synthetic", "domains": DOMAINS, "dtype": "bfloat16"}
    with RecordingWriter(path, "router_input", (router.name,), **texts) as writer:
        for first in range(0, num_tokens, SHARD):
            num = min(SHARD, num_tokens - first)
            rows = token_inputs(member, router.layer, first, num)
            if noise:
                errors = _generator("noise", first).standard_normal(rows.shape, np.float32)
                rows += np.float32(noise) * errors
            inputs = (rows * router.gain).astype(ml_dtypes.bfloat16)
            logits = logits_of(prepared, inputs.astype(np.float32))
            assert logits is not None
            token = np.arange(first, first + num)
            document = token // DOCUMENT
            columns = TokenColumns(
                document=document,
                position=(token % DOCUMENT).astype(np.int32),
                token_id=_generator("ids", first).integers(0, 30_000, num, np.int32),
                domain=(document % len(DOMAINS)).astype(np.int16),
            )
            chosen = chosen_by(prepared, logits, kernels)
            writer.append(columns, {router.name: inputs}, {router.name: chosen})


def make(folder: Path, member: Member) -> None:
    """Everything of one member, in ``folder``."""
    write_checkpoint(folder / "model", member)
    write_b(folder / "model_b", folder / "model", member)
    for name, checkpoint in (("step_1", "model"), ("step_2", "model_b")):
        (folder / name).symlink_to(checkpoint, target_is_directory=True)
    write_recordings(folder, member)


def disk_bytes(folder: Path) -> int:
    """What a folder takes of the disk: holes take nothing, links once."""
    entries = (file.stat() for file in folder.rglob("*"))
    return sum({entry.st_ino: entry.st_blocks * 512 for entry in entries}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("member", choices=MEMBERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="the first layers alone")
    arguments = parser.parse_args()
    member = MEMBERS[arguments.member]
    make(arguments.folder, member.small() if arguments.small else member)
    print(f"{member.name}: {disk_bytes(arguments.folder) / 1e9:.2f} GB on the disk")


if __name__ == "__main__":
    main()
