"""What a checkpoint file may ask for before it is refused; each limit carries its reason."""

from __future__ import annotations

#: The safetensors library refuses longer headers too (MAX_HEADER_SIZE in its Rust source).
HEADER_BYTES = 100_000_000

#: index.json and config.json; the largest public index (90 000 tensors) has 9 MB.
JSON_BYTES = 100_000_000

#: Twenty times the tensors of the largest public checkpoint. Objects of a header are counted
#: before it is parsed, so that a header of brackets cannot ask for gigabytes of Python objects.
TENSORS = 2_000_000

#: Dimensions of a tensor; models use at most 5.
DIMENSIONS = 16

#: Elements and offsets are held in signed 64-bit integers by everyone else.
LARGEST_COUNT = 2**63 - 1
