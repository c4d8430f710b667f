"""Ranks for tests: the tests of a worker share them, and after a failure the next test has new ones."""

import contextlib

import pytest
from gang import Gang, end_groups


class Gangs:
    """One gang of each size, made when the first test asks for it."""

    def __init__(self):
        self._gangs = {}

    @contextlib.contextmanager
    def of(self, size):
        if size not in self._gangs:
            self._gangs[size] = Gang(size)
        gang = self._gangs[size]
        yield gang
        if gang.is_whole:
            gang(end_groups)
        else:
            self._gangs.pop(size).close()

    def close(self):
        for gang in self._gangs.values():
            gang.close()


@pytest.fixture(scope="session")
def gangs():
    gangs = Gangs()
    yield gangs
    gangs.close()


@pytest.fixture
def pair(gangs):
    with gangs.of(2) as gang:
        yield gang


@pytest.fixture
def four(gangs):
    with gangs.of(4) as gang:
        yield gang
