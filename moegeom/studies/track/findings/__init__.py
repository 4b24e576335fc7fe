"""What a series can show that no checkpoint does: checks in rooms of their subject."""
