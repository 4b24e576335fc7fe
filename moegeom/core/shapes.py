"""Shapes of arrays in annotations: ``Float64[np.ndarray, "tokens experts"]`` is an array.

Type checkers and users read the array alone. The tests put the names of jaxtyping in the place of
these, so that every shape, and every format of numbers, is executed (tests/conftest.py).
"""

from __future__ import annotations

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Float32
from typing import Annotated as Float64
from typing import Annotated as Int
from typing import Annotated as Int16
from typing import Annotated as Int32
from typing import Annotated as Int64
from typing import Annotated as Integer
from typing import Annotated as Shaped
from typing import Annotated as UInt8
from typing import Annotated as UInt16
from typing import Annotated as UInt32
from typing import Annotated as UInt64

__all__ = [
    "Bool", "Float", "Float32", "Float64", "Int", "Int16", "Int32", "Int64", "Integer", "Shaped",
    "UInt8", "UInt16", "UInt32", "UInt64",
]  # fmt: skip
