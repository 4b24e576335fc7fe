"""Checkpoints behind URLs, by ranges."""
