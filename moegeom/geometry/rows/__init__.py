"""Rows of two routers held against each other, and the norm in front of them."""
