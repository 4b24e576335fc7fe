"""One file for each format of documents."""
