"""What a series can show that no checkpoint does: one file per check."""
