"""Angles between the rows of routers, and spectra."""
