"""One run of the museum for all its tests, at the pace of a user.

Executing the shapes of every call makes a run of the gate ten times as long, mostly for single
numbers: it is done at night, for what is the matter in every layer.
"""

from collections.abc import Iterator

import jaxtyping
import pytest

from tests.by_day import IS_NIGHT
from tests.museum.gallery import Museum


@pytest.fixture(scope="session")
def museum(tmp_path_factory) -> Museum:
    return Museum(tmp_path_factory.mktemp("museum"))


@pytest.fixture(autouse=True)
def _pace(request: pytest.FixtureRequest) -> Iterator[None]:
    if IS_NIGHT and "all layers" in request.node.name:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
