"""A wing: what routers of a given shape can do at most, and claims of papers."""
