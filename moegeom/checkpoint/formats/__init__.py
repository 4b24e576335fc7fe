"""One file per storage format, listed by file name and imported when used."""
