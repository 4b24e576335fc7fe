"""Bytes to named tensors, lazily, from untrusted files."""
