"""What may have been done to a router between two checkpoints; one file for each subject."""
