"""Logits put together from those of other routers are those of a product of their own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moegeom.core.router import Provenance, Router, Rule, Weights
from moegeom.engine.flipping import engine_logits
from moegeom.studies.faults.operator import AS_STORED
from moegeom.studies.faults.shared_rows import composed, sources
from moegeom.variants.emulated import emulate

EXPERTS, HIDDEN = 24, 200


@pytest.fixture
def routers():
    """The router as it is and one with other rows, with biases of logits."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((2, EXPERTS, HIDDEN))
    bias = random.standard_normal((2, EXPERTS))
    rule, of = Rule(4, "softmax", Weights("scores"), True), Provenance("made up", (), "", "F32")
    plain = Router("text/0", "text", 0, weight[0], rule, of, logit_bias=bias[0])
    return plain, dataclasses.replace(plain, weight=weight[1], logit_bias=bias[1])


def mixed(routers, is_some):
    plain, edited = routers
    weight = np.where(is_some[:, None], edited.weight, plain.weight)
    bias = np.where(is_some, edited.logit_bias, plain.logit_bias)
    return dataclasses.replace(plain, weight=weight, logit_bias=bias)


def test_logits_of_shared_rows_are_those_of_the_product_bit_by_bit(routers):
    is_some = np.arange(EXPERTS) % 5 == 1
    inputs = np.random.default_rng(1).standard_normal((1500, HIDDEN)).astype(np.float32)
    known = [emulate(one, AS_STORED) for one in routers]
    wanted = emulate(mixed(routers, is_some), AS_STORED)
    source = sources(wanted, known)
    np.testing.assert_array_equal(source, is_some.astype(int))
    found = composed(source, [engine_logits(one, inputs) for one in known])
    np.testing.assert_array_equal(found, engine_logits(wanted, inputs))


def test_a_row_a_bias_or_inputs_of_its_own_are_not_shared(routers):
    known = [emulate(one, AS_STORED) for one in routers]
    own = mixed(routers, np.zeros(EXPERTS, bool))
    weight, bias = own.weight.copy(), own.logit_bias.copy()
    weight[3, 7] += 1.0
    bias[2] += 1.0
    assert sources(emulate(dataclasses.replace(own, weight=weight), AS_STORED), known) is None
    assert sources(emulate(dataclasses.replace(own, logit_bias=bias), AS_STORED), known) is None
    how = dataclasses.replace(AS_STORED, input="bfloat16")
    assert sources(emulate(own, how), known) is None
    assert sources(emulate(own, AS_STORED), known) is not None
