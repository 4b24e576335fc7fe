"""Hot loops: per-token quantities and the reductions that fold them.

Every kernel exists first in ``reference`` (NumPy, calling ``geometry``) and then under the same
name in ``cpu`` (Numba) and ``cuda``; ``table.py`` lists them with the tolerance each must keep.
"""
