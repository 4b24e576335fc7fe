"""Tokens through routers: tiles, quantities, reductions, and a loop that can be interrupted."""
