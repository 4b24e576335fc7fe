"""Parts of a scan: what each says when it is written, and what is missing."""
