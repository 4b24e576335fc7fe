"""The selection rule as pure functions, in the order in which a router applies them."""
