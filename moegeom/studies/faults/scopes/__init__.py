"""Where a fault may have been: documents, positions, ranks; a file each."""
