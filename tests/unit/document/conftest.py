"""Verdicts made up by hand, one check in each state, and the facts of a run."""

import pytest

from moegeom.core.finding import Finding, Outcome, Verdict

#: What a tensor name could hold to break out of each of the formats, or out of a terminal.
HOSTILE = (
    "a\nb\r\nc\t::error title=x::y ]]> %0A%25 \x1b[31m \x00\x08\x0b\x85 \ud800 \ufffe \u202egnp "
    "| `tick` ``two`` *_[x](http://e.vil)_* $x$ ![i](u) <script>alert(1)</script></details> &amp; "
    '"quoted" \\| \\'
)


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


ROUTER = {"is_affine": False, "stored_dtype": "BF16", "hidden_size": 7168, "num_experts": 256}
ROUTER |= {"name": "text/1", "top_k": 8, "has_selection_bias": True}

CHECKPOINT = {
    "name": "model@rev",
    "family": "deepseek_v3",
    "rule": "sigmoid + selection bias, best 4 of 8 groups, top 8 of 256",
    "fingerprint": "sha256:0123",
    "bytes_read": 226_000_000,
    "bytes_total": 688_000_000_000,
    "seconds": 9.0,
    "num_routers": 58,
    "num_expected": 58,
    "skipped": [],
}


@pytest.fixture(scope="session")
def run() -> dict:
    routers = [ROUTER | {"name": f"text/{layer}"} for layer in range(3, 61)]
    facts = {"moegeom": "0.1.0", "seconds": 9.125, "tokens": None, "trust": None}
    return facts | {"checkpoint": CHECKPOINT, "routers": routers}


@pytest.fixture(scope="session")
def run_on_tokens(run) -> dict:
    tokens = {"name": "rec", "stage": "router_input", "num_tokens": 4096, "num_documents": 64}
    tokens |= {"size_bytes": 3_360_000}
    trust = {"fingerprint": "matches", "rms_median": 1.0, "share_reproduced": 0.99996}
    return {**run, "tokens": tokens, "trust": trust | {"overridden": []}}


@pytest.fixture(scope="session")
def refused_run() -> dict:
    refused = {"code": "MGI106", "message": "model: scale of another kind.", "hint": "Write to us."}
    facts = {"moegeom": "0.1.0", "checkpoint": {"name": "model"}, "refused": refused}
    return facts | {"routers": [], "tokens": None, "trust": None}


def bias() -> Finding:
    return Finding(
        "warning",
        "MGN112",
        tuple(f"text/{layer}" for layer in range(3, 61)),
        "the selection bias does not survive a cast to bf16.",
        "256 distinct values become 9 to 14: they spread 0.31 around 6.9, where bf16 steps by "
        "0.031. Harmless as stored (fp32); most tokens would be mis-routed if an engine casts it.",
        "moegeom check --explain MGN112",
        "subtract 6.9 from every bias of the layer: 212 values survive. Proof that no choice "
        "changes: scores are compared with scores; a common shift cancels.",
    )


def duplicate() -> Finding:
    return Finding(
        "error",
        "MGI104",
        ("text/44",),
        "experts 12 and 97 are the same row.",
        "Bit-identical weights.",
        "moegeom list routers CKPT --layers 44" + " --and-a-long-option" * 6,
    )


def outcomes() -> tuple[Outcome, ...]:
    note = Finding("note", "MGN115", ("text/3", "text/5"), "the biases have a common offset.")
    long = Finding("warning", "MGG203", ("text/9",), "rows far from the median length.")
    ignored, since = ("MGG203", "a row is much longer than its layer's"), "known since step 900"
    bf16, shares = "the selection bias does not survive", "one expert takes several fair shares"
    return (
        Outcome("MGB203", shares, "warning", "needs tokens", "none"),
        Outcome("MGG201", "two experts have nearly the same direction", "warning", "passed"),
        Outcome(*ignored, "warning", "ignored", since, accepted=((long, since),)),
        Outcome("MGI101", "a router row is not finite", "error", "passed"),
        Outcome("MGI104", "two experts share a router row", "error", "failed", "", (duplicate(),)),
        Outcome("MGI121", "rows changed places", "error", "needs a baseline", "no baseline"),
        Outcome("MGN112", bf16, "warning", "failed", "", (bias(),)),
        Outcome("MGN115", "a common offset", "note", "failed", "", (note,)),
        Outcome(
            "MGN401", "exposure is not what it was", "warning", "inconclusive", "other version"
        ),
        Outcome(
            "MGP901", "a threshold is broken", "error", "does not apply", "the profile has none"
        ),
    )


@pytest.fixture(scope="session")
def failed() -> Verdict:
    """One check in each state; exit code 1."""
    return Verdict(
        outcomes(),
        detectable=("a load CV that changed by 0.031", "an expert 0.29 fair shares above"),
        not_looked_at=("load, margins, dead experts (no tokens)", "expert weights"),
    )


@pytest.fixture(scope="session")
def warned(failed) -> Verdict:
    """The same without the error and the inconclusive check; exit code 0."""
    others = [o for o in failed.outcomes if o.code not in ("MGI104", "MGN401")]
    return Verdict(tuple(others), "error", failed.detectable, failed.not_looked_at)


@pytest.fixture(scope="session")
def strict(warned) -> Verdict:
    """The same where warnings fail; exit code 1."""
    return Verdict(warned.outcomes, "warning", warned.detectable, warned.not_looked_at)


def written_by_others(text: str) -> tuple[Verdict, dict]:
    """A verdict and a run where everything that a file could have named is ``text``."""
    bad = Finding("error", "MGI105", ("text/1",), text, text, text, text)
    note = Finding("note", "MGN115", (text,), text)
    made = Verdict(
        (
            Outcome("MGI105", text, "error", "failed", "", (bad, bad)),
            Outcome("MGI106", text, "error", "inconclusive", text),
            Outcome("MGI107", text, "error", "ignored", text, accepted=((bad, text),)),
            Outcome("MGI108", text, "error", "needs tokens", text),
            Outcome("MGN115", text, "note", "failed", "", (note,)),
        ),
        detectable=(text,),
        not_looked_at=(text,),
    )
    numbers = {"bytes_read": 1, "bytes_total": 2, "seconds": 0.5, "num_routers": 1}
    checkpoint = {**CHECKPOINT, **numbers, "num_expected": None, "family": "olmoe"}
    checkpoint |= {"name": text, "rule": text, "skipped": [{"tensor": text, "reason": text}]}
    router = ROUTER | {"is_affine": True, "has_selection_bias": False}
    return made, {"checkpoint": checkpoint, "routers": [router], "tokens": None, "trust": None}


@pytest.fixture(scope="session")
def of_others():
    return written_by_others
