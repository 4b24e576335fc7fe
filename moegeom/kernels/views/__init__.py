"""Views: other ways of selecting from the states of reductions, one file each."""
