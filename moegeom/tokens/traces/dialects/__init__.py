"""One file per engine or trainer whose traces are read, listed by file name."""
