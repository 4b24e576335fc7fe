"""Which files are the checkpoint, for formats that come in one file or behind an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moegeom.checkpoint.folder import Folder, Location
from moegeom.checkpoint.shards import CheckpointShard, ShardedStore, missing_shards, parse_index
from moegeom.core.errors import CheckpointError


@dataclass(frozen=True)
class Naming:
    """What the files of a format are called: its index, and what its writers prefer."""

    index_suffix: str
    index: str
    single: str


@dataclass(frozen=True)
class Chosen:
    """The index to read, or the files without one; ``rival`` stands beside an index."""

    index: str = ""
    files: Sequence[str] = ()
    rival: str = ""


def choose(location: Location, files: Sequence[str], naming: Naming) -> Chosen:
    """What to read of a location; ``files`` are those in it that hold weights.

    Raises
    ------
    CheckpointError
        If a folder holds several indexes, none of which has the usual name.
    """
    if location.file is not None:
        is_index = location.file.endswith(naming.index_suffix)
        return Chosen(index=location.file) if is_index else Chosen(files=[location.file])
    indexes = [name for name in location.files if name.endswith(naming.index_suffix)]
    named = [name for name in indexes if name == naming.index] or indexes
    single = [name for name in files if name == naming.single]
    if len(named) > 1:
        raise CheckpointError(
            f"{location.folder.label}: holds {len(named)} indexes ({', '.join(named)}).",
            "Pass the index to read.",
        )
    if named:
        return Chosen(index=named[0], rival=naming.single if single else "")
    return Chosen(files=single or files)


def open_index(
    folder: Folder, chosen: Chosen, open_file: Callable[[str], CheckpointShard]
) -> ShardedStore:
    """The checkpoint behind an index.

    Raises
    ------
    CheckpointError
        If none of the files that it names is there, or it does not name the single file beside
        it. A file that is missing is an error for who needs it.
    """
    index = folder.file(chosen.index)
    shard_of = parse_index(folder, chosen.index)
    used = sorted(set(shard_of.values()))
    if chosen.rival and chosen.rival not in used:
        # transformers would load the single file, others the shards: do not guess.
        raise CheckpointError(
            f"{folder.label}: holds both {chosen.rival} and {chosen.index}, "
            "which does not name it.",
            "Pass the file or the index to read.",
        )
    missing = missing_shards(folder, chosen.index, used)
    if len(missing) == len(used):
        raise missing[used[0]].error()
    shards = {name: missing.get(name) or open_file(name) for name in used}
    return ShardedStore(folder, shards, shard_of, index.size_bytes())
