"""Exact enumeration of routing cells; the command line and the research wing import it."""
