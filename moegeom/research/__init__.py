"""A wing: what routers of some shape can do at all, and what papers say of them."""
