"""How long a moving input stays in its cell."""
