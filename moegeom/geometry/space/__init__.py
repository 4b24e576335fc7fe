"""Dimension and capacity of what a router sees."""
