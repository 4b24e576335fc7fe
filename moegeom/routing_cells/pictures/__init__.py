"""Pictures of slices: from cells to shapes, captions and tables of numbers."""
