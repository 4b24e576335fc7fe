"""Exact enumeration of routing cells; imported by the command line alone."""
