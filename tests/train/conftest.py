"""Ranks for tests: all files of a worker share them, because a process takes seconds to start."""

from collections.abc import Callable, Iterator

import pytest
from gang import Gang


@pytest.fixture(scope="session")
def gang_of() -> Iterator[Callable[[int], Gang]]:
    gangs: dict[int, Gang] = {}

    def whole(size: int) -> Gang:
        if size in gangs and gangs[size].is_broken:
            gangs.pop(size).close()
        if size not in gangs:
            gangs[size] = Gang(size)
        return gangs[size]

    yield whole
    for gang in gangs.values():
        gang.close()


@pytest.fixture
def pair(gang_of):
    return gang_of(2)


@pytest.fixture
def four(gang_of):
    return gang_of(4)
