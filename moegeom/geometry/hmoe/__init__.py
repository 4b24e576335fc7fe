"""Gated attention as a hierarchical mixture of experts (docs/theory.md C1 to C6)."""
