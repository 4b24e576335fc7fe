"""The results directory: what a run leaves behind, and what report and check begin from."""
