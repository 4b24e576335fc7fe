"""Recordings and foreign token files: everything that is a ``TokenSource``."""
