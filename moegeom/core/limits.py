"""What a file may ask for before it is refused: with the largest public ones in docs/storage.md.

Together they keep any file within 512 MB of memory beside its size, and within two seconds of the
processor but for honest tokens, which are data.
"""

from __future__ import annotations

# -------------------------------------------------------------------------------------- checkpoints
CONFIG_BYTES = 8_000_000
INDEX_BYTES = 64_000_000
HEADER_BYTES = 40_000_000
#: Bounded before a text is parsed, by counting what begins an object: a header of brackets cannot
#: ask for gigabytes. 200 000 tensors need it.
JSON_MEMORY = 350_000_000
TENSORS = 600_000
#: Each may cost a request.
FILES = 20_000
#: It stands in every sentence about the tensor.
NAME_LENGTH = 1024
DIMENSIONS = 16
#: Of JSON: configs hold 10^30, and thousands make sentences long.
INTEGER_DIGITS = 40
#: Of a file that names the newest save of a run.
POINTER_BYTES = 200
#: Elements and offsets are held in signed 64-bit integers by everyone else.
LARGEST_COUNT = 2**63 - 1
ZIP_ENTRIES = 150_000
#: The directory of as many entries whose names have 80 characters.
ZIP_DIRECTORY_BYTES = 20_000_000
#: Each object is counted with the most that it can take; 100 000 tensors need five sixths of it.
PICKLE_OBJECT_BYTES = 300_000_000
#: Of a key and of a global: each may be compared once per opcode.
PICKLE_NAME_LENGTH = 4096
#: 220 bytes for each piece of a tensor on a rank. Reading one takes much less than a step.
PICKLE_BYTES = 30_000_000
#: A step is an opcode, or a part of a slow one, and 0.3 microseconds at most; a piece needs 115.
PICKLE_STEPS = 8_100_000
#: Each call copies them.
PICKLE_ARGUMENTS = 255
TORCH_PICKLE_BYTES = 16_000_000
TORCH_SPAN_BYTES = 1 << 30
#: Characters of all names, and items looked at: one dict may be reached on a million ways, and a
#: list may hold itself.
TORCH_STEPS = 30_000_000
MEGATRON_ARGUMENT_BYTES = 16_000_000
MEGATRON_NAME_CHARACTERS = 60_000_000
GGUF_TENSORS = 30_000
GGUF_SETTINGS = 1024
GGUF_HEADER_BYTES = 64_000_000
GGUF_STRINGS = 2_500_000
GGUF_PARTS = 1000
#: A name of a tensor has at most 64 by the specification; the longest key has 45.
GGUF_NAME_LENGTH = 256
#: Longer ones are chat templates, licences and whole tokenizers, and are left out.
GGUF_TEXT_BYTES = 4096
#: Longer ones are vocabularies, and are left out: a setting has an element per layer.
GGUF_ARRAY_VALUES = 256
#: A number takes 28 times its bytes in the file.
GGUF_NUMBERS = 2**24
DCP_PIECES = 200_000
#: Cells of the grid that the borders of all pieces draw. Ranks cut along one or two axes, so that
#: a piece is a cell; a million ranks are more than there are.
SLICE_CELLS = 1 << 20
#: Folders of a run that are looked into for its saves.
FOLDERS = 2000
#: A router has at most a few hundred MB; a header that claims more is not believed.
ROUTER_BYTES = 1 << 30
#: Values of rows and projection, and of both composed: twice the largest router.
ROUTER_COMPOSED_VALUES = 1 << 23
#: Of experts by token id.
TOKEN_TABLE_BYTES = 1 << 28
#: Entries of a list that says which layers are dense.
LAYER_LIST = 4096
ATTENTION_LAYERS = 10_000
ATTENTION_HEADS = 65_536
ATTENTION_WIDTH = 1 << 22
#: Modules that a quantiser lists as left alone: one for each of the largest model is less.
QUANTISED_MODULES = 100_000
#: Of trying its globs and expressions on the modules of routers, some ten nanoseconds each.
QUANTISER_STEPS = 20_000_000
QUANTISER_PATTERN_LENGTH = 200
#: Each is compared with the shapes of every router.
QUANTISER_GROUPS = 1000
#: A JSON object of bitsandbytes.
QUANTISER_STATE_BYTES = 65_536
#: A packed weight needs a multiple of its bytes; eight times the largest router.
ROUTER_PACKED_VALUES = 1 << 25

# ------------------------------------------------------------------------------------------ servers
#: One read over a network. The largest router has a few hundred megabytes.
REMOTE_READ_BYTES = 1 << 30
#: A body that comes more slowly is given up, so that a server cannot hold us forever.
REMOTE_BYTES_PER_S = 20_000
REMOTE_REDIRECTS = 10
#: Between two slashes; file systems and object stores allow 255 and 1024.
REMOTE_NAME_LENGTH = 1024

# ------------------------------------------------------------------------------------------- tokens
TOKEN_FILES = 100_000
#: Hashed as a whole, some hundredths of a second; of larger files places are.
HASHED_BYTES = 1 << 26
SCAN_PARTS = 100_000
#: A text file to capture, or one line of JSON lines, is held as a whole.
TEXT_BYTES = 256 << 20
DOMAINS = 32_767
#: What moegeom writes is smaller, and held as a whole.
RECORDING_GROUP_TOKENS = 1 << 20
#: A line is the plan or a shard, and a shard is a hundred bytes.
JOURNAL_LINE_BYTES = 4 << 20
OUTPUT_BYTES = 1 << 31
RECORD_BYTES = 48_000_000
#: An empty list takes 60 bytes of memory and two of text.
RECORD_VALUES = 3_000_000
#: Of a file of JSON lines, which is read up to four times; each costs a third of a microsecond.
BLANK_LINES = 500_000
#: Held as stored, and once more in the smallest integers that name the experts.
TRACE_BYTES = 160_000_000
#: Lists in each other: sequences, tokens, layers and slots, and some to spare.
LIST_DEPTH = 8
SEQUENCE_TOKENS = 1 << 31
TRACE_EXPERTS = 65_536
#: Layers times slots of a row.
TRACE_SLOTS = 65_536
#: Tokens of one expert; sums of many stay exact.
EXPERT_COUNT = 1 << 40
#: Of what was read of one file, which is kept for the next command: some hundred for each request.
SURVEY_BYTES = 1 << 31
CHOICES_BYTES = 1 << 30
#: Of each side: document, position and token id are held.
ALIGNED_TOKENS = 100_000_000
MAP_BYTES = 16_000_000
MAP_PLACES = 65_536
NPZ_ARRAYS = 20_000
#: Numbers that were measured are hardly smaller compressed. Two copies are held for a moment.
NPZ_HELD_BYTES = 1 << 27
#: Bytes that deflate makes of one, with some to spare.
NPZ_INFLATION = 1040
#: Bytes that compression makes of one where numbers say something.
NPZ_COMPRESSION = 20
#: That come in no order, and are counted: 32 bytes for each.
UNSORTED_DOCUMENTS = 1 << 22
PT_HELD_BYTES = 1 << 30
#: Parquet cannot be read in smaller pieces.
PARQUET_GROUP_BYTES = 1 << 30
PARQUET_WIDTH = 1 << 20
#: Each costs 35 microseconds before anything is decoded, and a page 16.
PARQUET_GROUPS = PARQUET_CHUNKS = 30_000
PARQUET_PAGES = 50_000
#: Of a footer: a column of a row group has some 40.
PARQUET_VALUES = 2_000_000
#: Of a page: one with statistics has some hundred.
PARQUET_HEADER_BYTES = 1 << 14
PARQUET_FREE_BYTES = 1 << 29
PARQUET_TEXT_BYTES = 1 << 28
#: Beside one for each byte of the table: what was measured does not repeat itself.
RESULT_VALUES = 1_000_000
RESULT_COLUMNS = 2000
LOG_PROB_BYTES = 1 << 30
#: 32 bytes each are held, and as much again while they are joined.
LOG_PROB_ROWS = 1 << 22

# ---------------------------------------------------------------------------------------- documents
MOST_JSON = 1 << 26
#: Each value or key takes up to some 200 bytes of Python objects, and a microsecond of its readers.
JSON_ENTRIES = 1_000_000
MOST_NESTED = 100
#: Of the states of one router in unfinished work; those of 1024 experts have some 100 million.
SNAPSHOT_BYTES = 1 << 33
MOST_TOML = 1 << 18
FAMILY_CHARACTERS = 1 << 16
#: Of a tensor on which its patterns are tried.
FAMILY_NAME_LENGTH = 200
#: The parser's time and memory grow with the square of the dots of one key.
MOST_DOTS = 100
