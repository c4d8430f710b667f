"""Bounded cache: the values used last, up to a size such as a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class BoundedCache(Generic[ValueT]):
    """Values by key, the ones used last. Safe to use from several threads.

    Args:
        most: size of all values together.
        size_of: size of a value, such as its bytes.
    """

    def __init__(self, most: int, size_of: Callable[[ValueT], int]) -> None:
        self.most, self.size = most, 0
        self._size_of, self._lock = size_of, Lock()
        self._values: OrderedDict[Hashable, ValueT] = OrderedDict()

    def __deepcopy__(self, memo: object) -> BoundedCache[ValueT]:
        """A copy of what has a cache begins with an empty one."""
        return BoundedCache(self.most, self._size_of)

    def get(self, key: Hashable) -> ValueT | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: ValueT) -> None:
        """Keep a value, instead of those used longest ago; one larger than the bound is not kept."""
        with self._lock:
            if (old := self._values.pop(key, None)) is not None:
                self.size -= self._size_of(old)
            self._values[key] = value
            self.size += self._size_of(value)
            while self.size > self.most:
                self.size -= self._size_of(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.size = 0
