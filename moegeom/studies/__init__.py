"""Commands that are more than the main road, one file each."""
