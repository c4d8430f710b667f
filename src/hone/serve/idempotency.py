"""The `Idempotency-Key` header: one key, one body.

Scores are remembered by content, so a repeated request is answered alike with or without a key. What a key adds is that
two different bodies under one key, a mistake of the caller's, are found, and that a repeat does not overtake the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from hone.serve.problem import Problem

_MAX_KEYS = 10_000


@dataclass(slots=True)
class _Use:
    body_hash: bytes
    until: float
    in_flight: bool = True


class IdempotencyKeys:
    """Keys that were used lately."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._uses: OrderedDict[tuple[str, str], _Use] = OrderedDict()

    @contextlib.contextmanager
    def use(self, client: str, key: str | None, body: bytes) -> Iterator[None]:
        """While a request with this key is answered; None: it has none.

        Raises Problem: 409, the same is being answered; 422, the key was used with another body.
        """
        if key is None:
            yield
            return
        use = self._claim((client, key), hashlib.sha256(body).digest())
        try:
            yield
        finally:
            use.in_flight = False

    def _claim(self, name: tuple[str, str], body_hash: bytes) -> _Use:
        now = time.monotonic()
        while self._uses and (len(self._uses) >= _MAX_KEYS or next(iter(self._uses.values())).until < now):
            self._uses.popitem(last=False)
        use = self._uses.get(name)
        if use is not None and use.body_hash != body_hash:
            raise Problem(422, "idempotency-key-reused", "this Idempotency-Key came with another body before")
        if use is not None and use.in_flight:
            detail = "a request with this Idempotency-Key is being answered"
            raise Problem(409, "already-in-flight", detail, retryable=True, retry_after_s=1)
        use = self._uses[name] = _Use(body_hash, now + self._ttl_s)
        self._uses.move_to_end(name)
        return use
