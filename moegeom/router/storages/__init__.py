"""Storage schemes of router weights, one file each; files with an underscore are shared parts."""
