"""Kernels on an NVIDIA GPU: CUDA sources, and what starts them through CuPy.

``route`` is what scans run: it does in one pass what the kernels named as in
``moegeom.kernels.table`` do one by one. Those are made of the same device functions; they take and
give arrays of the host, and are there to be compared with the reference.
"""
