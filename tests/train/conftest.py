"""Ranks for tests: a file of them has its own, which end with it."""

import pytest
from gang import Gang


@pytest.fixture(scope="module")
def pair():
    gang = Gang(2)
    yield gang
    gang.close()


@pytest.fixture(scope="module")
def four():
    gang = Gang(4)
    yield gang
    gang.close()
