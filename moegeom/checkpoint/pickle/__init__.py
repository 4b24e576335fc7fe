"""Pickles without running them."""
