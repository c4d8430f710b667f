"""Who sends to whom, who is sent a version again, and what that moves: no process."""

import pytest

from hone.errors import ClusterError
from hone.weights.buckets import Manifest
from hone.weights.publish import Published
from hone.weights.publisher import Publisher, Routes
from hone.weights.sending import Target, by_engine

MANIFEST = Manifest(version=7, buckets=2, tensors=3, num_bytes=1000, fingerprint="ab")


def found(held=(), failed=None, bystanders=(), sent_bytes=1000, manifest=MANIFEST):
    return Published(manifest, tuple(held), failed or {}, tuple(bystanders), sent_bytes)


class Ranks:
    """Answers what it is told, round by round."""

    def __init__(self, *rounds):
        self._rounds = list(rounds)
        self.asked = []

    def __call__(self, targets, way):
        self.asked.append(({name: target.rank for name, target in targets.items()}, way))
        return self._rounds.pop(0)


def test_each_engine_gets_weights_from_the_rank_on_its_gpu():
    routes = Routes("ipc", ranks={"engine-0": 0, "engine-1": 1})
    ranks = Ranks([found(held=["engine-0"]), found(held=["engine-1"])])
    published = Publisher(routes).publish({"engine-0": "a", "engine-1": "b"}, ranks)
    assert ranks.asked == [({"engine-0": 0, "engine-1": 1}, "ipc")]
    assert published.held_by == ("engine-0", "engine-1") and not published.failed


def test_bystanders_are_sent_the_version_again_without_the_one_that_failed():
    lost = {"engine-0": "engine-0 lost the others of its group", "engine-1": "engine-1 died"}
    ranks = Ranks([found(failed=lost, bystanders=["engine-0"], sent_bytes=500), None], [found(held=["engine-0"]), None])
    publisher = Publisher(Routes("gloo"))
    published = publisher.publish({"engine-0": "a", "engine-1": "b"}, ranks)
    assert [targets for targets, _ in ranks.asked] == [{"engine-0": 0, "engine-1": 0}, {"engine-0": 0}]
    assert published.held_by == ("engine-0",) and published.failed == {"engine-1": "engine-1 died"}
    assert publisher.metrics()["engine/published_over_least"] == pytest.approx((2 * 500 + 1000) / (2 * 1000))


def test_bystanders_of_nobody_are_not_sent_it_for_ever():
    lost = dict.fromkeys(("engine-0", "engine-1"), "lost the others")
    ranks = Ranks([found(failed=lost, bystanders=list(lost))])
    assert Publisher(Routes("gloo")).publish(dict.fromkeys(lost), ranks).failed == lost


def test_ranks_that_sent_different_weights_are_an_error():
    other = Manifest(version=7, buckets=2, tensors=3, num_bytes=1000, fingerprint="cd")
    ranks = Ranks([found(held=["engine-0"]), found(held=["engine-1"], manifest=other)])
    with pytest.raises(ClusterError, match="ranks of the trainer sent different weights"):
        Publisher(Routes("ipc", ranks={"engine-1": 1})).publish({"engine-0": "a", "engine-1": "b"}, ranks)


@pytest.mark.parametrize(
    ("way", "machines", "least"),
    [
        ("gloo", {"engine-0": 0, "engine-1": 0}, 2 * 1000 / 2000),  # once for each engine
        ("ray", {"engine-0": 0, "engine-1": 0}, 1000 / 1000),  # both read the same memory
        ("ray", {"engine-0": 1, "engine-1": 2}, 3 * 1000 / 2000),  # and a copy where the trainer is
    ],
)
def test_bytes_moved_over_the_least_possible(way, machines, least):
    routes = Routes(way, machines=machines, sender_machine=0)
    assert routes.moved_over_least([found(held=list(machines))], list(machines)) == pytest.approx(least)


def test_an_engine_of_several_processes_holds_a_version_when_all_of_them_do():
    engines = {"whole": Target(None), "divided": Target(None, members=2), "late": Target(None, members=2)}
    failed = {"late.0": "lost the others", "late.1": "late.1 is stuck"}
    seen = by_engine(found(["whole", "divided.0", "divided.1"], failed, ["late.0"]), engines)
    assert seen.held_by == ("whole", "divided") and seen.failed == {"late": "late.1 is stuck"} and not seen.bystanders
    waits = by_engine(found(["whole"], {"divided.0": "lost"}, ["divided.0"]), {"divided": engines["divided"]})
    assert waits.failed == {"divided": "lost"} and waits.bystanders == ("divided",)
