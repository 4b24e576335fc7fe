"""How often noise on inputs flips a choice."""
