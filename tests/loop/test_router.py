"""Several engines as one, on a virtual clock: whatever dies, hangs or lies, each sample is drawn once, from weights
that are current, and is the one that a run without faults would have drawn."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from fakes import fake_run, run_virtually
from replicas import FakeReplica, Fleet, request, token_of

from hone.errors import ClusterError, EngineError
from hone.loop import policy
from hone.run.audit import audit


def virtually(test, *names, **options):
    """Run an async test with a fleet that holds version 0, and close it."""

    async def run():
        fleet = Fleet(*names, **options)
        await fleet.router.load([], 0)
        try:
            return await test(fleet)
        finally:
            await fleet.router.close()

    return run_virtually(run())


def right(samples, prompt, count=4):
    return [(s.index, s.token_ids.tolist()) for s in samples] == [(i, [token_of(prompt, i)]) for i in range(count)]


def test_groups_go_whole_to_the_replica_with_the_fewest_samples_to_draw():
    async def test(fleet):
        sizes = [8, 2, 2, 2, 4]
        await asyncio.gather(*(fleet.router.generate(request(i, size)) for i, size in enumerate(sizes)))
        return {name: [(r.prompt.index, r.num_samples) for r in fleet.now(name).requests] for name in "ab"}

    assert virtually(test) == {"a": [(0, 8)], "b": [(1, 2), (2, 2), (3, 2), (4, 4)]}


def test_samples_that_were_finished_are_kept_and_the_others_drawn_elsewhere():
    async def test(fleet):
        handed = []
        asyncio.get_running_loop().call_later(2.5, fleet.now("a").die)
        samples = await fleet.router.generate(request(3), handed.append)
        assert right(samples, 3) and sorted(s.index for s in handed) == [0, 1, 2, 3], "each is handed on once"
        (again,) = fleet.now("b").requests
        assert (again.first_sample, again.num_samples, again.seed) == (2, 2, 0), "with the randomness it would have had"
        return fleet.events("sampled", "replica_down", "requeued")

    drawn, down, requeued, rest = virtually(test)
    assert (drawn["replica"], down["replica"], requeued["replica"], rest["replica"]) == ("a", "a", "a", "b")
    assert down["why"] == requeued["why"] == "a was killed by SIGKILL"


def test_gaps_between_finished_samples_are_drawn_and_nothing_else():
    async def test(fleet):
        generate = fleet.now("a").generate

        async def out_of_order(request, on_sample):
            for index in (0, 2, 4):
                on_sample((await generate(replace(request, first_sample=index, num_samples=1)))[0])
            raise EngineError("a died")

        fleet.now("a").generate = out_of_order
        assert right(await fleet.router.generate(request(1, samples=6)), 1, 6)
        return [(r.first_sample, r.num_samples) for r in fleet.now("b").requests]

    assert virtually(test) == [(1, 1), (3, 1), (5, 1)]


def test_a_replica_that_hangs_is_given_up_and_its_later_replies_are_ignored():
    async def test(fleet):
        hanging, handed = fleet.now("a"), []
        fleet.lives["b"][0].die()
        await asyncio.sleep(1)
        hanging.hangs = True
        samples = await fleet.router.generate(request(5), handed.append)
        assert right(samples, 5) and len(handed) == 4 and hanging.closed
        return fleet.events("replica_down")[0]["why"]

    assert virtually(test) == "sampling: a gave no sign of life for 60 s"


def test_a_long_group_is_no_hang_while_samples_come():
    async def test(fleet):
        assert right(await fleet.router.generate(request(0, 100)), 0, 100)
        return fleet.events("replica_down")

    assert virtually(test) == [], "a hundred seconds, with a sign of life each second"


def test_a_replica_started_again_samples_only_once_it_has_the_current_version():
    async def test(fleet):
        fleet.now("a").die()
        await fleet.router.generate(request(0))  # finds out
        await asyncio.sleep(0.2)  # its successor is being started
        await fleet.router.load([], 1)
        drawing = [asyncio.ensure_future(fleet.router.generate(request(i))) for i in (1, 2)]
        await asyncio.sleep(0.1)
        assert len(fleet.lives["a"]) == 1 and len(fleet.now("b").requests) == 3
        await asyncio.sleep(4)
        assert len(fleet.lives["a"]) == 2 and fleet.now("a").version == 1 and not fleet.now("a").requests
        await asyncio.gather(*drawing, fleet.router.generate(request(3)))
        assert fleet.now("a").loads == [1] and len(fleet.now("a").requests) == 1

    virtually(test)


def test_weights_that_come_while_a_replica_loads_older_ones_are_loaded_after_them():
    async def test(fleet):
        fleet.now("a").die()
        await fleet.router.generate(request(0))
        while len(fleet.lives["a"]) == 1:
            await asyncio.sleep(0.1)
        await fleet.router.load([], 1)  # half a second each
        assert fleet.now("a").loads == [0, 1] and fleet.now("b").loads == [0, 1]

    virtually(test)


def test_a_replica_that_cannot_load_is_down_and_the_others_continue():
    async def test(fleet):
        fleet.now("a").refuses_weights = True
        await fleet.router.load([], 1)
        assert fleet.router.version == 1 and right(await fleet.router.generate(request(2)), 2)
        return fleet.events("replica_down")[0]["why"]

    assert virtually(test) == "a has no memory for weights"


def test_a_replica_with_other_bytes_is_not_asked():
    async def test(fleet):
        liar = fleet.now("b")
        load = liar.load

        async def torn(weights, version):
            await load(weights, version)
            liar.bytes = "torn in half"

        liar.load = torn
        await fleet.router.load([], 1)
        assert right(await fleet.router.generate(request(2)), 2) and not liar.requests
        return fleet.events("replica_down")[0]["why"]

    assert virtually(test) == "version 1 hashes to torn in half in b, elsewhere to bytes of 1"


def test_a_replica_that_was_started_while_the_trainer_moved_on_waits_for_the_next_version():
    async def test(fleet):
        load = FakeReplica.load

        def prepare(replica):
            async def of_the_next_version(weights, version):
                await load(replica, weights, version)
                replica.bytes = "bytes of 1"

            replica.load = of_the_next_version

        fleet.prepare = prepare
        fleet.now("a").die()
        await fleet.router.generate(request(0))
        await asyncio.sleep(20)
        late = fleet.now("a")
        await fleet.router.generate(request(1))
        assert late.loads == [0] and not late.requests and len(fleet.events("replica_down")) == 1
        del late.load
        await fleet.router.load([], 1)
        await asyncio.gather(*(fleet.router.generate(request(i)) for i in (2, 3)))
        assert late.loads == [0, 1] and len(late.requests) == 1

    virtually(test)


def test_a_trainer_that_cannot_give_weights_is_no_fault_of_the_replicas():
    async def test(fleet):
        async def fail(weights, version):
            raise ClusterError("publishing version 1: trainer rank 0 died")

        for name in "ab":
            fleet.now(name).load = fail
        with pytest.raises(ClusterError, match="rank 0 died"):
            await fleet.router.load([], 1)
        assert not fleet.events("replica_down")

    virtually(test)


def test_a_call_that_waits_for_a_replica_fails_when_there_are_no_weights_for_it():
    async def test(fleet):
        async def fail(weights, version):
            raise ClusterError("publishing version 0: trainer rank 0 died")

        fleet.prepare = lambda replica: setattr(replica, "load", fail)
        fleet.now("a").die()
        with pytest.raises(ClusterError, match="rank 0 died"):
            await fleet.router.generate(request(0))

    virtually(test, "a")


@pytest.mark.parametrize("torn", [False, True])
def test_tokens_of_weights_that_are_not_known_to_be_whole_are_held_back(torn):
    """An engine goes on with new weights before anybody has compared them; if they are torn, it drew for nothing."""

    async def test(fleet):
        replica = fleet.now("b")
        load = replica.load

        async def slow(weights, version):
            await load(weights, version)
            replica.bytes = "torn in half" if torn else replica.bytes
            await asyncio.sleep(20)

        replica.load = slow
        handed = []
        await asyncio.gather(
            fleet.router.generate(request(0)), fleet.router.generate(request(1), handed.append), publish(fleet, handed)
        )
        assert sorted(s.index for s in handed) == [0, 1, 2, 3]
        return audit_of(fleet), [s.versions for s in handed]

    async def publish(fleet, handed):
        await asyncio.sleep(1.2)
        publishing = asyncio.ensure_future(fleet.router.load([], 1))
        await asyncio.sleep(15)
        assert [s.versions for s in handed] == [((0, 1),)], "one was finished before; the others wait"
        await publishing

    def audit_of(fleet):
        drawn = [(e["replica"], e["versions"]) for e in fleet.events("sampled") if e["prompts"] == [1]]
        order = [e["kind"] for e in fleet.events("sampled", "published") if e.get("replica") == "b"]
        return drawn, order

    (drawn, order), versions = virtually(test)
    if torn:
        assert drawn == [("b", (0, 0)), ("a", (1, 1))] and order == ["published", "sampled"]
    else:
        assert drawn == [("b", (0, 1))] and order == ["published", "published", "sampled"]
    assert versions == [((0, 1),), ((1, 1),), ((1, 1),), ((1, 1),)]


def test_with_no_replica_left_the_message_says_what_each_died_of():
    async def test(fleet):
        fleet.cannot_start = True
        fleet.now("a").die("was killed by SIGKILL")
        fleet.now("b").die("ended with exit code 1")
        with pytest.raises(EngineError) as caught:
            await fleet.router.generate(request(0))
        return str(caught.value)

    assert virtually(test, restarts=2) == (
        "prompt p0: no engine is left. a: could not be started: no device is left; "
        "b: could not be started: no device is left"
    )
    assert "a: a was killed by SIGKILL; b: b ended with exit code 1" in virtually(test, restarts=0)


def test_no_call_waits_longer_than_patience():
    async def test(fleet):
        for name in "ab":
            fleet.now(name).die()
        started = asyncio.get_running_loop().time()
        fleet.router._restart = lambda name: asyncio.sleep(1e6)
        with pytest.raises(EngineError, match=r"prompt p0: no engine could sample within 20 s\. a: a was killed"):
            await fleet.router.generate(request(0))
        return asyncio.get_running_loop().time() - started

    assert virtually(test, patience_s=20) < 25


def test_sleep_wake_and_a_death_in_between():
    async def test(fleet):
        await fleet.router.sleep()
        assert fleet.now("a").asleep and fleet.now("b").asleep
        with pytest.raises(EngineError, match="asleep"):
            await fleet.router.generate(request(0))
        fleet.now("a").die()
        await fleet.router.load([], 1)
        await asyncio.sleep(20)
        assert len(fleet.lives["a"]) == 2 and fleet.now("a").asleep, "started after the load, and put to sleep as well"
        await fleet.router.wake()
        assert not fleet.now("a").asleep and not fleet.now("b").asleep
        drawing = asyncio.ensure_future(fleet.router.generate(request(0)))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="in flight"):
            await fleet.router.sleep()
        assert right(await drawing, 0) and not fleet.events("replica_down")[1:]

    virtually(test)


def test_sleep_waits_for_a_start_whose_engine_gets_its_weights_on_waking():
    async def test(fleet):
        fleet.now("a").die()
        await fleet.router.generate(request(0))  # finds out
        await asyncio.sleep(0.2)  # its successor is being started, which takes 5 s
        assert len(fleet.lives["a"]) == 1
        await fleet.router.sleep()
        await asyncio.sleep(0.1)
        successor = fleet.now("a")
        assert len(fleet.lives["a"]) == 2 and successor.asleep and fleet.now("b").asleep
        assert not successor.loads, "the trainer computes now, and sends nothing"
        await fleet.router.wake()
        assert not successor.asleep and successor.loads == [0]
        await asyncio.gather(*(fleet.router.generate(request(i)) for i in range(2)))
        assert len(successor.requests) == 1

    virtually(test)


def test_a_replica_is_started_only_when_the_weights_were_sent():
    async def test(fleet):
        await fleet.router.sleep()
        fleet.now("a").die()
        loading = asyncio.ensure_future(fleet.router.load([], 1))
        await asyncio.sleep(0.4)  # `b` loads for 0.5 s
        assert not fleet.router._replicas.may_start.is_set()
        await loading
        assert fleet.router._replicas.may_start.is_set()

    virtually(test)


def test_a_replica_that_comes_back_while_the_others_wake_is_awake_in_the_end():
    async def test(fleet, delay):
        await fleet.router.sleep()
        fleet.now("a").die()
        await fleet.router.load([], 1)
        await asyncio.sleep(delay)  # around the moment at which its successor is there
        await fleet.router.wake()
        await asyncio.sleep(20)
        assert len(fleet.lives["a"]) == 2 and not fleet.now("a").asleep and fleet.now("a").version == 1
        assert not fleet.events("replica_down")[1:]

    for delay in (4.9, 5.0, 5.1, 5.4, 5.5, 5.6, 6.0):
        virtually(lambda fleet, delay=delay: test(fleet, delay))


def test_close_closes_all_and_ends_what_waits():
    async def run():
        fleet = Fleet()
        await fleet.router.load([], 0)
        drawing = asyncio.ensure_future(fleet.router.generate(request(0)))
        await asyncio.sleep(0.5)
        await fleet.router.close()
        await fleet.router.close()
        with pytest.raises(EngineError, match="closed"):
            await drawing
        assert fleet.now("a").closed and fleet.now("b").closed
        assert not fleet.events("replica_down", "requeued")

    run_virtually(run())


def test_an_error_of_the_request_is_no_fault_of_the_replica():
    async def test(fleet):
        async def refuse(request, on_sample):
            raise ValueError("a bug")

        fleet.now("a").generate = refuse
        with pytest.raises(ValueError, match="a bug"):
            await fleet.router.generate(request(0))
        return fleet.events("replica_down", "requeued")

    assert virtually(test) == []


def test_metrics_count_since_the_last_line():
    async def test(fleet):
        asyncio.get_running_loop().call_later(2.5, fleet.now("a").die)
        await asyncio.gather(*(fleet.router.generate(request(i)) for i in range(3)))
        first, second = fleet.router.metrics(), fleet.router.metrics()
        assert first["engine/a_samples"] + first["engine/b_samples"] == 12 and first["engine/requeued"] >= 1
        assert first["engine/a_queue_peak"] == 8 and second["engine/a_queue_peak"] == 0 == second["engine/requeued"]

    virtually(test)


async def kill_at_random(fleet, clock, until):
    """Kill, hang or break the fingerprint of one replica every few seconds."""
    while not until.is_set():
        await asyncio.sleep(clock.choice([3, 10, 30]))
        victim = fleet.now(clock.choice(list(fleet.lives)))
        if clock.random() < 0.3:
            victim.hangs = True
        else:
            victim.die()


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_whole_loop_over_replicas_that_keep_dying_breaks_no_rule(max_staleness):
    """Every few seconds something dies or hangs; what is trained on is what a run without faults trains on."""

    def train(seed, faults):
        async def run():
            run = fake_run(max_staleness, seed=seed, steps=12, equal_frac=0.0)
            fleet = Fleet("abc", silence_s=30, seed=seed, random_latencies=True)
            fleet.router._observer = run.observer
            for name in fleet.lives:
                run.observer.event("replica_up", replica=name)
            run.engine, run.weights_are_shared, over = fleet.router, False, asyncio.Event()
            killing = asyncio.ensure_future(kill_at_random(fleet, random.Random(seed), over)) if faults else None
            recorded = []
            run.observer.record = lambda stage, step, groups, *_: recorded.append((step, groups))
            await policy.train_policy(run)
            over.set()
            if killing is not None:
                await killing
            await fleet.router.close()
            return run.observer.events, recorded

        events, recorded = run_virtually(run())
        found = audit(events)
        assert found.violations == () and found.updates == 12, str(found)
        samples = [sample for _, groups in recorded for group in groups for sample in group.samples]
        trained = {(s.prompt_id, s.index): s.token_ids.tolist() for s in samples}
        return found, trained

    faults = Counter()
    for seed in range(4):
        _, calm = train(seed, faults=False)
        found, trained = train(seed, faults=True)
        faults += Counter(found.counts)
        assert trained == calm
    assert faults["replica_down"] >= 8 and faults["requeued"] >= 8, "the faults really happened"
