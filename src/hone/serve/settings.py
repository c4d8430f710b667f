"""Settings of the reward service beyond those of every server (`http.HttpSettings`), and their defaults."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hone.reward.wire import MAX_ITEMS, MAX_RESPONSE_BYTES


class ScoringSettings(BaseModel):
    """How much a reward service takes on, for how long, and what it remembers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    max_items: int = Field(1024, ge=1, le=MAX_ITEMS)
    """Items of one request."""
    max_solution_kib: int = Field(256, ge=1, le=MAX_RESPONSE_BYTES >> 10)
    """Longest response that is scored, in KiB of UTF-8; a longer one earns the least that the reward declares."""
    queue_items: int = Field(4096, ge=1)
    """Items that wait or are being scored; requests beyond that are refused (503)."""
    client_items: int = Field(0, ge=0)
    """The same for one client (by token, else by address), refused with 429; 0: no limit of its own."""
    max_wait_s: float = Field(60.0, gt=0)
    """A request that would wait longer than this, or than its own deadline, before it is scored is refused (503)."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline of a request that has none of its own, in seconds."""
    max_in_flight_groups: int = Field(256, ge=1)
    """Groups that one component is given at one time; what scores them may have a lower limit of its own."""
    batch_items: int = Field(64, ge=1)
    """Items of different requests that a component which can look at many at a time is given together."""
    batch_wait_ms: float = Field(2.0, ge=0)
    """How long the first of them waits for others while that component has nothing to do, in milliseconds."""
    cache_items: int = Field(65_536, ge=0)
    """Scores that are remembered, so that the same item asked again is answered at once and the same."""
    cache_ttl_s: float = Field(3600.0, gt=0)
    """How long, in seconds."""
    allow_request_weights: bool = False
    """Let /compute_reward bring weights of its own for the components."""
    unscored_constant: float | None = None
    """What /get_reward and /slime answer for an item that could not be scored; null, the honest setting: 503."""
