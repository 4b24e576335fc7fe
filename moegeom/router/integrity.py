"""Codes of the integrity checks that reading itself can break (moegeom/checks/catalogue)."""

from __future__ import annotations

#: Config and tensors contradict each other.
CONFIG_CONTRADICTED = "MGI105"

#: Storage that nobody knows, such as a scale tensor without a rule.
STORAGE_UNKNOWN = "MGI106"

#: The gating function is said nowhere.
GATING_UNSAID = "MGI113"

#: A part of a router is not there.
PART_MISSING = "MGI107"

#: A value of the config, or of a tensor, is one that no rule takes.
OUT_OF_RANGE = "MGI116"
