"""Who sends to whom, who is sent a version again, and what that moves: no process."""

import pytest

from hone.errors import ClusterError
from hone.weights.buckets import Manifest
from hone.weights.publish import Published
from hone.weights.routes import Publisher, Routes

MANIFEST = Manifest(version=7, buckets=2, tensors=3, num_bytes=1000, fingerprint="ab")
TWO = {"engine-0": "a", "engine-1": "b"}


def found(held=(), failed=None, refused=(), sent_bytes=1000, manifest=MANIFEST):
    return Published(manifest, tuple(held), failed or {}, tuple(refused), sent_bytes)


class Ranks:
    """Answers what it is told, round by round."""

    def __init__(self, *rounds):
        self._rounds = list(rounds)
        self.asked, self.ids = [], []

    def __call__(self, targets, transport, update_id):
        self.asked.append({name: target.ranks for name, target in targets.items()})
        self.ids.append(update_id)
        return self._rounds.pop(0)


def test_each_worker_gets_weights_from_the_rank_on_its_gpu():
    routes = Routes("ipc", ranks={"engine-0": (0, 1), "engine-1": (2, 3)}, num_workers=2)
    ranks = Ranks([found(held=["engine-0"])] * 2 + [found(held=["engine-1"])] * 2)
    publisher = Publisher(routes)
    published = publisher.publish(TWO, ranks)
    assert ranks.asked == [{"engine-0": (0, 1), "engine-1": (2, 3)}]
    assert published.held_by == ("engine-0", "engine-1") and not published.failed
    assert publisher.metrics()["engine/published_over_least"] == pytest.approx(1)


def test_an_engine_that_refused_a_version_is_sent_it_once_more_and_the_other_is_not():
    refused = {"engine-0": "engine-0: bucket 3 is missing"}
    ranks = Ranks([found(["engine-1"], refused, ["engine-0"]), None], [found(held=["engine-0"]), None])
    publisher = Publisher(Routes("gloo"))
    published = publisher.publish(TWO, ranks)
    assert ranks.asked == [{"engine-0": (0,), "engine-1": (0,)}, {"engine-0": (0,)}]
    assert len(set(ranks.ids)) == 2, "an attempt of its own, so that calls of the first one are told from it"
    assert set(published.held_by) == set(TWO) and not published.failed
    assert publisher.metrics()["engine/published_over_least"] == pytest.approx((2 * 1000 + 1000) / (2 * 1000))


def test_an_engine_that_refuses_a_version_twice_is_dropped():
    refused = found(["engine-1"], {"engine-0": "engine-0: no"}, ["engine-0"])
    ranks = Ranks([refused], [found((), {"engine-0": "engine-0: no"}, ["engine-0"])])
    published = Publisher(Routes("gloo")).publish(TWO, ranks)
    assert published.held_by == ("engine-1",) and published.failed == {"engine-0": "engine-0: no"}


def test_an_engine_that_does_not_answer_is_not_sent_it_again():
    ranks = Ranks([found(["engine-1"], {"engine-0": "engine-0: ActorDiedError"})])
    published = Publisher(Routes()).publish(TWO, ranks)
    assert published.held_by == ("engine-1",) and list(published.failed) == ["engine-0"]


def test_an_engine_holds_a_version_when_all_ranks_that_send_to_it_say_so():
    one = [found(["engine-0"]), found((), {"engine-0": "engine-0: stuck"})]
    routes = Routes("ipc", ranks={"engine-0": (0, 1)})
    published = Publisher(routes).publish({"engine-0": "a"}, Ranks(one))
    assert published.held_by == () and published.failed == {"engine-0": "engine-0: stuck"}


def test_ranks_that_sent_different_weights_are_an_error():
    other = Manifest(version=7, buckets=2, tensors=3, num_bytes=1000, fingerprint="cd")
    ranks = Ranks([found(held=["engine-0"]), found(held=["engine-1"], manifest=other)])
    with pytest.raises(ClusterError, match="ranks of the trainer sent different weights"):
        Publisher(Routes("ipc", ranks={"engine-1": (1,)})).publish(TWO, ranks)


@pytest.mark.parametrize(
    ("transport", "machines", "least"),
    [
        ("gloo", {"engine-0": 0, "engine-1": 0}, 2 * 1000 / 2000),  # once for each engine
        ("ray", {"engine-0": 0, "engine-1": 0}, 1000 / 1000),  # both read the same memory
        ("ray", {"engine-0": 1, "engine-1": 2}, 3 * 1000 / 2000),  # and a copy where the trainer is
    ],
)
def test_bytes_moved_over_the_least_possible(transport, machines, least):
    routes = Routes(transport, machines=machines, sender_machine=0)
    assert routes.moved_over_least([found(held=list(machines))], list(machines)) == pytest.approx(least)
