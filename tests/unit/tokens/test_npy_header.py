"""What the header of an array in NumPy's own format says of its numbers."""

import io

import numpy as np

from moegeom.tokens.foreign.npy import read_npy_header


def test_the_size_of_an_array_is_that_of_its_numbers_behind_the_header():
    for shape, is_column in (((5,), True), ((5, 3), False), ((2, 5, 3), False)):
        array, stream = np.zeros(shape, np.float32), io.BytesIO()
        np.save(stream, array)
        size = stream.tell()
        stream.seek(0)
        allowed = (array.dtype,)
        header = read_npy_header(stream, size, "x.npy", allowed, is_column, not is_column)
        assert (header.size_bytes, header.data_start) == (array.nbytes, size - array.nbytes)
        assert header.layer_bytes * header.layers == array.nbytes
        assert (header.num_rows, header.layers) == (5, shape[0] if len(shape) == 3 else 1)
