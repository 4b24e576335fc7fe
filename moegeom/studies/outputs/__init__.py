"""What experts give on recorded tokens, computed from the checkpoint."""
