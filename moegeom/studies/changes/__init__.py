"""What changed between two routers; what diff and signoff share."""
