"""Where rewards find the services of a run: one URL, or several with what they must be shown."""

import pytest

from hone.reward.args import address_of
from hone.reward.http import Address

REPLICAS = Address(("http://a:1", "http://b:2"), "made by the run")


def test_a_service_is_one_url_or_replicas_with_their_token(monkeypatch):
    services = {"one": "http://127.0.0.1:1", "many": REPLICAS}
    assert address_of(None, "one", None, services) == Address(("http://127.0.0.1:1",))
    assert address_of(None, "many", None, services) == REPLICAS
    assert address_of(["http://a:1", "http://b:2"], None, None, {}).urls == REPLICAS.urls
    monkeypatch.setenv("MINE", "of the user's own")
    assert address_of(None, "many", "MINE", services) == Address(REPLICAS.urls, "of the user's own")
    assert "made" not in repr(REPLICAS), "it may end up in a log"


def test_what_is_not_there_is_reported():
    with pytest.raises(ValueError, match="either url or service"):
        address_of(None, None, None, {})
    with pytest.raises(ValueError, match=r"no service 'mani'. Did you mean 'many'"):
        address_of(None, "mani", None, {"many": REPLICAS})
    with pytest.raises(ValueError, match="MISSING is not set"):
        address_of("http://a:1", None, "MISSING", {})
