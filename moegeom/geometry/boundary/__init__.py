"""Where the chosen set changes: distances, orders, reachable experts."""
