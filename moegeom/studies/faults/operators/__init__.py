"""What may have been done to a router, its inputs, its rule or what it writes, by subject."""
