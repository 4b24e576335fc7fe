"""Cells within a distance, found from boundary to boundary."""
