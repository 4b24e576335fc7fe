"""What a file may ask for before it is refused; each limit carries its reason.

Together they keep any file within 512 MB of memory beside its size, and within two seconds of the
processor but for honest tokens, which are data. The table in docs/storage.md has a row for each.
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

#: An entry is a tensor; the largest public file of this format has tens of thousands.
ZIP_ENTRIES = 150_000

#: The directory of as many entries whose names have 80 characters.
ZIP_DIRECTORY_BYTES = 20_000_000

#: Memory for the objects of one pickle, each counted with the most that it can take. The metadata
#: of a distributed checkpoint of 100 000 tensors needs five sixths of it.
PICKLE_OBJECT_BYTES = 300_000_000

#: Longest dict key and longest name of a global: each may be compared once per opcode.
PICKLE_NAME_LENGTH = 4096

#: The metadata of a distributed checkpoint has 220 bytes for each piece of a tensor on a rank:
#: 15 MB for seventy thousand. Reading one byte takes much less than a step.
PICKLE_BYTES = 30_000_000

#: Work: a step is an opcode, or a part of one that takes longer, and 0.3 microseconds at most. The
#: same metadata needs 114 for each piece: seventy thousand of them are read within two seconds.
PICKLE_STEPS = 8_100_000

#: The pickle of a hundred thousand tensors whose names have 60 characters.
TORCH_PICKLE_BYTES = 16_000_000

#: What is read for a tensor that does not lie in one piece; a router has a few hundred MB.
TORCH_SPAN_BYTES = 1 << 30

#: Of the arguments of a run, which lie beside its tensors.
MEGATRON_ARGUMENT_BYTES = 16_000_000

#: Of the names of all layers, 100 for each of the most tensors.
MEGATRON_NAME_CHARACTERS = 60_000_000

#: Experts of a layer are one tensor: the largest public models have 2 000.
GGUF_TENSORS = 30_000

#: Public models have at most a hundred.
GGUF_SETTINGS = 1024

#: Headers hold a vocabulary; the largest (262 000 tokens, 514 000 merges) has 16 MB.
GGUF_HEADER_BYTES = 64_000_000

#: Elements of all arrays of strings, three times those of the largest vocabulary.
GGUF_STRINGS = 2_500_000

#: Public models have at most fifty.
GGUF_PARTS = 1000

#: A number takes 28 times its bytes in the file, and the largest router has three million.
GGUF_NUMBERS = 2**24

#: Three times the pieces for which the steps of a pickle suffice.
DCP_PIECES = 200_000

#: One record. The choices of 16 000 tokens in 60 layers, as base64 of 32-bit integers.
RECORD_BYTES = 48_000_000

#: Values in one record; an empty list takes 60 bytes of memory and two of text.
RECORD_VALUES = 3_000_000

#: Bytes of a file that is read in one block, of the ids of one request, and of counts: what is held
#: in memory as stored, and once more in the smallest integers that name the experts.
TRACE_BYTES = 160_000_000

#: Files that are looked at together.
TOKEN_FILES = 100_000

#: Arrays of one npz file: an engine writes one for each request.
NPZ_ARRAYS = 20_000

#: Of all compressed arrays of one file together, beside four times the size of the file: numbers
#: that were measured are hardly smaller compressed. Two copies are held for a moment.
NPZ_HELD_BYTES = 1 << 27

#: Of all tensors of one file that do not lie in one piece.
PT_HELD_BYTES = 1 << 30

#: One column of one row group, decoded; Parquet cannot be read in smaller pieces.
PARQUET_GROUP_BYTES = 1 << 30

#: Numbers of one token; the widest hidden states have some ten thousand.
PARQUET_WIDTH = 1 << 20

#: Numbers of all layers and experts together.
COUNTS = 4_000_000

#: Bytes of a map: 200 layers of 4096 places, with room for white space.
MAP_BYTES = 16_000_000

#: Places of a layer.
MAP_PLACES = 65_536

#: Bytes of one list of token ids or positions, at most 27 million of them.
LIST_BYTES = 27_000_000

#: Columns of row groups that one file may have; each costs work before anything is decoded.
PARQUET_CHUNKS = 100_000

#: Pages of all columns that are read at once; each is looked at before any is decoded.
PARQUET_PAGES = 100_000

#: Row groups of one file; each costs work before anything is decoded.
PARQUET_GROUPS = 100_000

#: Bytes that a file of any size may inflate to.
PARQUET_FREE_BYTES = 1 << 29

#: Of a text that is stored once and meant in many rows, what all rows together may have.
PARQUET_TEXT_BYTES = 1 << 28

#: Dots in a line of TOML; names of tensors have up to nine. The parser's time and memory grow with
#: the square of the dots of one key.
MOST_DOTS = 100

#: Characters of TOML: a profile and a family file are a page of text, a project's file a few.
MOST_TOML = 1 << 18

#: Bytes of JSON, unless the caller says otherwise.
MOST_JSON = 1 << 26

#: Values and keys of a JSON text; each takes up to some 200 bytes of Python objects.
JSON_ENTRIES = 2_000_000

#: Lists and objects within one another; configs and results have ten.
MOST_NESTED = 100

#: Characters; the longest family here has 3700.
FAMILY_CHARACTERS = 1 << 16

#: Bytes of a file, most of which may be columns that nobody asked for.
LOG_PROB_BYTES = 1 << 30

#: Rows of a file: 32 bytes each are held, and as much again while they are joined.
LOG_PROB_ROWS = 1 << 22
