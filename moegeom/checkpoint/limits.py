"""What a checkpoint file may ask for before it is refused; each limit carries its reason.

Together they keep any file within 512 MB of memory and a few seconds.
"""

from __future__ import annotations

#: The largest public config, with a scheme for each of its layers, has half a megabyte.
CONFIG_BYTES = 8_000_000

#: The largest public index (280 000 tensors in 4 bits, with their scales) has 30 MB.
INDEX_BYTES = 64_000_000

#: A public file has at most some thousand tensors; this is room for two hundred thousand.
HEADER_BYTES = 40_000_000

#: Memory for what one JSON text describes. It is bounded before the text is parsed, by counting
#: what begins an object: a header of brackets cannot ask for gigabytes. 200 000 tensors need it.
JSON_MEMORY = 350_000_000

#: Twice the tensors of the largest public checkpoint.
TENSORS = 600_000

#: The largest public checkpoints have a few hundred files, a large run has one or two for each of
#: its ranks. Each may cost a request.
FILES = 20_000

#: Characters of a tensor's name; it stands in every sentence about the tensor.
NAME_LENGTH = 1024

#: Dimensions of a tensor; models use at most 5.
DIMENSIONS = 16

#: Elements and offsets are held in signed 64-bit integers by everyone else.
LARGEST_COUNT = 2**63 - 1
