"""Reports and exports of a series of checkpoints, one file each."""
