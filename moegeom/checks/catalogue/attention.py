"""Gates and sinks of attention: shape, zeros, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moegeom.checks.check import Limits, Unknown, check, same_sentence
from moegeom.checks.measured import Measured
from moegeom.core.finding import Finding
from moegeom.core.text import listed

_attention_check = partial(
    check,
    inputs="attention",
    facts="attention_gates",
    absent="no gate and no sink of attention is known in this checkpoint",
)


@_attention_check("MGA101", "an attention gate is zero", "warning", alike=same_sentence)
def attention_gate_zero(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """No head has an attention gate of zeros.

    Looked for: with --attention, gate rows, and the biases beside them, that are all zero in a
    head.

    A finding means: the gate of this head is one number whatever it reads, a half for a sigmoid. In
    a trained model that is a tensor that was never loaded, or was lost in a conversion.

    What to do: where this is a model before its training, nothing. Else compare the file with its
    source, and the name of the tensor with what the loader looks for; docs/attention.md.
    """
    for one in measured.run["attention_gates"]:
        if one.get("zero"):
            yield attention_gate_zero.finding(
                one["layer"],
                f"{len(one['zero'])} of {one['num_heads']} attention gates are zero: head "
                f"{listed(one['zero'])}.",
                f"{one['tensor']}: these gates are the same number for every token.",
            )


@_attention_check("MGA102", "an attention gate or sink is not finite", "error")
def attention_not_finite(measured: Measured, limits: Limits) -> Iterator[Finding | Unknown]:
    """Every attention gate and every learned sink is finite.

    Looked for: with --attention, gate rows, their biases and sink logits with nan or infinity. A
    sink of minus infinity is a head without one, and passes.

    A finding means: what this head gives is nan, or its gate is shut or open for every token. The
    file is damaged, or training diverged before it was saved.

    What to do: compare the file with its source, then look at earlier checkpoints.
    """
    for one in measured.run["attention_gates"]:
        if one["refused"] and not one["is_shape"]:
            yield Unknown(one["layer"], one["refused"])
        elif one.get("not_finite"):
            yield attention_not_finite.finding(
                one["layer"],
                f"{len(one['not_finite'])} of {one['num_heads']} attention heads have a gate or a "
                f"sink that is not finite: head {listed(one['not_finite'])}.",
                f"{one['tensor']}: what these heads give is not a number, or does not depend on "
                "the token.",
            )


@_attention_check("MGA103", "an attention gate has another shape than its heads", "error")
def attention_gate_shape(measured: Measured, limits: Limits) -> Iterator[Finding]:
    """Attention gates and sinks have the shape that their heads use.

    Looked for: with --attention, the rows of gate matrices and the lengths of sinks beside the
    number of heads, which follows from the output matrix and the width of a head.

    A finding means: rows are left over or missing. A loader stops, or gives heads the gates of
    others.

    What to do: compare shapes with config.json and with the source of the file; a conversion that
    parts or joins heads has to do the same to their gates and sinks.
    """
    for one in measured.run["attention_gates"]:
        if one["refused"] and one["is_shape"]:
            yield attention_gate_shape.finding(
                one["layer"],
                f"heads cannot use {one['tensor'].rpartition('.self_attn.')[2]}.",
                f"{one['refused']}.",
            )
