"""Numba kernels, named and typed as in ``reference``; compiled on first use, then cached on disk.

Each file has a thin typed function, which allocates the outputs, around one compiled loop.
Loops release the GIL. Fast-math flags are given only where no infinity or nan can arise that
matters, and only those that allow another order of summation.
"""
