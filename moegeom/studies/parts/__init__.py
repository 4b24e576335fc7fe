"""Documents on a written part of a scan, and on missing parts."""
