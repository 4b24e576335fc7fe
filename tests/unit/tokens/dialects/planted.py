"""What goes wrong with traces, planted, and what must become of it in each dialect."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tests.unit.tokens.dialects.written import EXPERTS, FIRST, TOP_K, Truth, Written, truth

#: "cleaned" with these words in the notes, "refused" with these words in the error, or "misplaced":
#: cleaned, and refused by these words when aligned with a recording.
Outcome = tuple[str, str]


@dataclass(frozen=True)
class Planted:
    """One defect. ``outcomes`` begin with the general case and name exceptions by writer or kind.

    ``num_tokens`` is what is left after cleaning; None where the number says nothing.
    """

    name: str
    plant: Callable[[list[Written]], list[Written]]
    outcome: Outcome
    exceptions: dict[str, Outcome] = field(default_factory=dict)
    num_tokens: int | None = None
    num_experts: int = EXPERTS
    truth: Callable[[], Truth] = truth


def _each(change: Callable[[Written], np.ndarray]) -> Callable[[list[Written]], list[Written]]:
    return lambda requests: [replace(request, ids=change(request)) for request in requests]


def _behind(request: Written, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([request.ids, rows])


def _filled(request: Written, num_rows: int, value: object) -> np.ndarray:
    rows = np.zeros((num_rows, *request.ids.shape[1:]), np.int64)
    rows[:, FIRST:] = value
    return _behind(request, rows)


def _first(change: Callable[[np.ndarray], None]) -> Callable[[list[Written]], list[Written]]:
    def plant(requests: list[Written]) -> list[Written]:
        ids = requests[0].ids.copy()
        change(ids)
        return [replace(requests[0], ids=ids), *requests[1:]]

    return plant


def _name_physical_places(ids: np.ndarray) -> None:
    ids[3:9, FIRST:, 1] += EXPERTS


def _name_an_expert_twice(ids: np.ndarray) -> None:
    ids[5, 2, 1] = ids[5, 2, 0]


def _leave_a_row_out(ids: np.ndarray) -> None:
    ids[5] = 0


def _empty_a_layer(ids: np.ndarray) -> None:
    ids[:, 2] = 0


def _fill_dense_layer(requests: list[Written]) -> list[Written]:
    return _each(lambda r: np.concatenate([r.ids[:, 1:2], r.ids[:, 1:]], axis=1))(requests)


def _shift_rows(request: Written) -> np.ndarray:
    return np.concatenate([request.ids[1:], request.ids[:1]])


def _turn_layers(request: Written) -> np.ndarray:
    return np.concatenate([request.ids[:, :FIRST], np.roll(request.ids[:, FIRST:], 1, axis=1)], 1)


def _other_text(requests: list[Written]) -> list[Written]:
    other = truth(seed=9)
    return [
        replace(request, tokens=tokens)
        for request, tokens in zip(requests, other.tokens, strict=True)
    ]


def _cleaned(words: str) -> Outcome:
    return "cleaned", words


def _refused(words: str) -> Outcome:
    return "refused", words


def _misplaced(words: str) -> Outcome:
    return "misplaced", words


#: What is said of a trace that cannot be cut to the texts of a recording, and of a log.
_TOO_LONG = _misplaced("expected as many or one less")
_LOG = {"log": _misplaced("3 documents and the trace 1 request")}
_NO_PLACE = {"vllm arrays": _TOO_LONG, "megatron": _TOO_LONG, **_LOG}
_NOWHERE = dict.fromkeys(("aligned", "padded"), _misplaced("no place stands out")) | _NO_PLACE

#: What is said of writers without token ids, and of those that leave nothing out.
_WHOLE = _cleaned("Trace of")
_NO_TOKENS = {"vllm arrays": _cleaned("no token ids"), "batches": _WHOLE}
_ROUTERS_ALONE = {"batches": _WHOLE, "routers": _WHOLE}
_ALIKE = _cleaned("equal to another in every token and choice, kept: 1")

#: What is said where the writer itself leaves out rows behind the last token, or its mask does.
_ONE_MISSING = _cleaned("requests whose last token was never routed: 3")
_CUT = _cleaned("padding rows cut behind the last routed token: 9")
_BY_ITSELF = {"aligned": _ONE_MISSING, "padded": _cleaned("cut by the file's own mask")}

#: What is said of rows that are empty behind the last token, where not by the padding's name.
_AT_THE_END = _cleaned("rows without choices cut at the end (padding): 9")
_EMPTY_ROWS = {
    **_BY_ITSELF,
    **dict.fromkeys(("vllm arrays", "megatron"), _AT_THE_END),
    # a log has no requests, only one end
    "log": _cleaned("rows without choices left out between others: 6"),
}

_DENSE = _cleaned("layers without router, which hold no choices: 1")
_IN_FRONT = _refused("holds choices in layer 0, which has no router")
_AS_EXPERTS = _refused("padding written as experts")
_NONE_IN_1 = _refused("holds none in layer 1, which has one")
_NAMES_FOUR = _refused("names the layers 1, 2, 3, 4; the routers of the checkpoint are")


def _same(requests: list[Written]) -> list[Written]:
    return requests


PLANTED = (
    Planted(
        "nothing is wrong but the last row, which no engine has",
        _same,
        _ONE_MISSING,
        _NO_TOKENS,
        65,
    ),
    Planted("layers without a router are zeros", _same, _DENSE, _ROUTERS_ALONE, 65),
    Planted("padding is -1", _each(lambda r: _filled(r, 3, -1)), _CUT, _EMPTY_ROWS, 65),
    Planted("padding is 0", _each(lambda r: _filled(r, 3, 0)), _CUT, _EMPTY_ROWS, 65),
    Planted(
        "padding looks like experts",
        _each(lambda r: _filled(r, 3, np.arange(TOP_K))),
        _CUT,
        {**_BY_ITSELF, "vllm arrays": _AS_EXPERTS, "batches": _AS_EXPERTS},
        65,
    ),
    Planted(
        "padding repeats the last row",
        _each(lambda r: _behind(r, np.repeat(r.ids[-1:], 4, axis=0))),
        _cleaned("padding rows cut behind the last routed token: 12"),
        # with neither tokens nor mask it may be text: aligned, it has too many rows
        _BY_ITSELF | _NO_PLACE,
        65,
    ),
    Planted(
        "rows of a longer answer",
        _each(lambda r: _behind(r, r.ids[2:6])),
        _refused("at the end look like choices"),
        {"nemo_rl": _ONE_MISSING, **_NO_PLACE},
    ),
    Planted(
        "the prefix is omitted and nobody says so",
        _each(lambda r: r.ids[4:]),
        _refused("4 rows are missing and nothing in the file says which"),
        _NOWHERE,
    ),
    Planted(
        "the prompt is omitted",
        _each(lambda r: r.ids[r.num_prompt :]),
        _cleaned("positions of prompts omitted, only generated tokens were recorded: 18"),
        {"vllm 0.21": _cleaned("only generated tokens were recorded: 18"), **_NOWHERE},
        47,
    ),
    Planted(
        "ids have wrapped",
        lambda requests: [
            replace(request, ids=request.ids % 256, dtype="uint8") for request in requests
        ],
        _refused("cannot name 512 experts"),
        dict.fromkeys(
            ("vllm 0.21", "sglang", "megatron", "log", "nemo_rl", "areal"), _refused("8 bits")
        ),
        num_experts=512,
        truth=lambda: truth(num_experts=512),
    ),
    Planted(
        "ids are physical places",
        _first(_name_physical_places),
        _refused("Physical ids of expert load balancing?"),
    ),
    Planted(
        "rows are shifted by one token", _each(_shift_rows), _misplaced("shifted by +1 token"), _LOG
    ),
    Planted(
        "layers are shifted by one",
        _each(lambda r: np.concatenate([np.zeros_like(r.ids[:, :1]), r.ids], axis=1)),
        _refused("It fits when layers are shifted by +1"),
        # where layers without a router are left out, it is the one that was put in front
        {"batches": _NAMES_FOUR, "routers": _DENSE},
    ),
    Planted(
        "the last layer stands first",
        _each(lambda r: np.roll(r.ids, 1, axis=1)),
        _IN_FRONT,
        {"batches": _NONE_IN_1, "routers": _NONE_IN_1},
    ),
    Planted(
        "routers are in another order", _each(_turn_layers), _misplaced("shifted by -1 layer"), _LOG
    ),
    Planted("an expert stands twice", _first(_name_an_expert_twice), _refused("stands twice in")),
    Planted(
        "a row between others is lost",
        _first(_leave_a_row_out),
        _cleaned("rows without choices left out between others: 1"),
        num_tokens=64,
    ),
    Planted(
        "a layer was not gathered",
        lambda requests: [_first(_empty_a_layer)([request])[0] for request in requests],
        _refused("holds none in layer 2, which has one"),
    ),
    Planted("a dense layer holds choices", _fill_dense_layer, _IN_FRONT, _ROUTERS_ALONE),
    Planted(
        "k is another",
        _each(lambda r: r.ids[:, :, :3]),
        _refused("3 experts a token and layer; the routers of the checkpoint choose 4"),
        {"sglang": _refused("no multiple of|rows for|stands twice|layers")},
    ),
    Planted(
        "token ids are of another text",
        _other_text,
        _misplaced("matched rows are of another token"),
        _NO_TOKENS,
    ),
    Planted(
        "a request stands in the file twice",
        lambda requests: [*requests, requests[1]],
        _cleaned("requests left out because they stand there twice: 1"),
        {"numbered": _ALIKE, "vllm arrays": _cleaned("no token ids"), "megatron": _ALIKE, **_LOG},
    ),
    Planted(
        "one name stands for two requests",
        lambda requests: [*requests, replace(requests[1], name=requests[0].name)],
        _refused("stands twice in it, with different choices"),
        {"numbered": _ALIKE, "vllm arrays": _TOO_LONG, "megatron": _ALIKE, **_LOG},
    ),
    Planted(
        "nothing was captured",
        _each(lambda r: np.zeros_like(r.ids)),
        _refused("nothing was captured"),
    ),
)

#: Where engines can say that they left a prefix out.
_AS_SAID = _cleaned("leading positions omitted, as the file says: 12")
OMITTED = Planted(
    "the prefix is omitted and the reply says so",
    lambda requests: [replace(request, ids=request.ids[4:], cached=4) for request in requests],
    _cleaned("leading positions omitted, as many as the engine had cached: 12"),
    {"sglang": _AS_SAID, "prime_rl": _AS_SAID},
    53,
)
