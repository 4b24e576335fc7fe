"""Other routers on the same tokens, one file each."""
