"""Recordings, foreign token files and priors: everything that is a ``TokenSource``."""
