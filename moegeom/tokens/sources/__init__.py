"""One file per kind of token file, listed by file name and imported when used."""
