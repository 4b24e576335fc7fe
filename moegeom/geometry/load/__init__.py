"""How tokens spread over experts, and what chance alone would do."""
