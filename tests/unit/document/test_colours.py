"""Colours of one figure are told apart by everybody, red-blind and green-blind readers too."""

import numpy as np
import pytest

from moegeom.document.colours import GROUPS, GROUPS_ON_BLACK, ROLES, parsed
from moegeom.routing_cells.pictures.page import PALETTE

#: Machado, Oliveira and Fernandes 2009, severity 1, on linear red, green and blue.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}  # fmt: skip


def oklab(linear):
    """Ottosson 2020."""
    to_cone = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.cbrt(linear @ np.transpose(to_cone)) @ np.transpose(to_lab)


#: Colours that stand beside each other in a figure.
TOGETHER = {
    "meanings on white": [on_white for on_white, _ in ROLES.values()],
    "meanings on black": [on_black for _, on_black in ROLES.values()],
    "groups on white": GROUPS,
    "groups on black": GROUPS_ON_BLACK,
    "cells": PALETTE,
}


@pytest.mark.parametrize("colours", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("people", SEEN_BY)
def test_any_two_colours_differ_for_everybody(people, colours):
    encoded = np.array([parsed(colour) for colour in colours]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = oklab(np.clip(linear @ SEEN_BY[people].T, 0, 1))
    apart = np.linalg.norm(seen[:, None] - seen, axis=-1) + np.eye(len(seen))
    assert apart.min() > 0.05  # two hundredths are just seen
