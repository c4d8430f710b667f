"""Real processes of Ray's with toys in them: what the loop's handles do when all is well, and when it is not."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from ray.exceptions import GetTimeoutError
from ray_processes import gone, make_engine, processes, toy_cluster, words_of
from ray_toys import Orders, toy_engine, toy_trainer

from hone.assemble.stages import lost_process
from hone.cluster.actors import TrainerRank
from hone.cluster.calls import kill
from hone.cluster.ranks import RankGroup
from hone.cluster.ray import RayCluster
from hone.cluster.trainer import RemoteTrainer
from hone.config.cluster import ClusterSection
from hone.errors import ClusterError, DataError, EngineError, PlacementError
from hone.model.fingerprint import weights_fingerprint
from hone.rollout.engine import Request, Sampling
from hone.types import Prompt

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow("starts Ray")]

FAILED = {
    "stumble": " failed: RuntimeError: connection to a peer",
    "value": " failed: ValueError: shapes differ",
    "system": r" failed: OSError: \[Errno 5\]",
    "own": " failed: OwnError: of a class made here",
    "picky": ": UnserializableException: .*PickyError: code 7: no such rank",
}
SAMPLING = Sampling(4, 1.0, 0, 1.0, 0.0, (), ())


@pytest.fixture(scope="module")
def cluster():
    with toy_cluster() as cluster:
        yield cluster


class Joined(RayCluster):
    """Another run in the Ray of this process."""

    def _connect(self):
        pass

    def close(self):
        self._thread.shutdown()


def make_trainer(cluster, ranks, timeout_s=30.0):
    actors = [cluster.spawn(TrainerRank, 60.0, devices=[number], shared_by=2) for number in range(ranks)]
    trainer = RemoteTrainer(RankGroup("trainer", actors, toy_trainer), timeout_s=timeout_s, bucket_size=1024)
    trainer.start(is_one_machine=True, timeout_s=120)
    return trainer


def request_of(text="", samples=1):
    return Request(Prompt("p", 0, text, (7,)), samples, SAMPLING, 0, "train")


def test_what_this_process_starts_next_inherits_nothing_of_a_ray_on_the_loopback(cluster):
    from ray._private import ray_constants

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ, "`ray start` would refuse to join another one"
    assert ray_constants.ENABLE_RAY_CLUSTER
    assert "RAY_AUTH_MODE" not in os.environ, "nor does it ask others for this one's token"


class Environment:
    def of(self, name):
        return os.environ.get(name)

    def niceness(self):
        return os.nice(0)


def test_an_actor_has_the_run_s_environment_and_this_process_has_not(cluster):
    actor = cluster.spawn(Environment, devices=[0], shared_by=2, env=ClusterSection(env={"HONE_TOY": "1"}).env)
    assert ray.get(actor.of.remote("HONE_TOY"), timeout=60) == "1"
    assert "HONE_TOY" not in os.environ
    ray.kill(actor)


def test_an_actor_gets_as_much_of_a_busy_cpu_as_this_process(cluster):
    actor = cluster.spawn(Environment, devices=[0], shared_by=2)
    assert ray.get(actor.niceness.remote(), timeout=60) == os.nice(0), "of itself Ray adds 15"
    ray.kill(actor)


def test_signals_of_this_process_group_do_not_reach_ray(cluster):
    started = [p for p in psutil.Process().children(recursive=True) if "/session_" in " ".join(words_of(p))]
    assert len(started) >= 3 and os.getsid(0) not in {os.getsid(process.pid) for process in started}


def test_devices_that_others_have_are_waited_for_and_their_holder_is_named(cluster):
    settings = ClusterSection(backend="ray", address="auto", start_timeout_s=2)
    said = []
    with (
        Joined(settings, name="second", resource="CPU", num_devices=2, say=said.append) as second,
        pytest.raises(ClusterError, match=r"2 CPUs were not free within cluster.start_timeout_s = 2 s.*first holds 4"),
    ):
        second.start()


def test_a_machine_that_is_too_small_is_refused_at_once(cluster):
    with (
        Joined(ClusterSection(backend="ray"), name="second", resource="GPU", num_devices=2, say=print) as second,
        pytest.raises(PlacementError, match="2 devices, this machine has 0 GPUs"),
    ):
        second.start()


def test_engine_and_trainer_in_processes_of_their_own(cluster):
    """One test, since each process takes seconds to start."""
    trainer = make_trainer(cluster, ranks=2)
    assert trainer.hf_config == {"ranks": 2}
    assert trainer.update(Orders(), None) == {"rank": 0, "updates": 1}, "every rank is asked, rank 0 answers"
    assert len(processes("TrainerRank")) == 2

    async def run():
        engine = make_engine(cluster)
        await engine.build(toy_engine, timeout_s=120)
        with pytest.raises(EngineError, match="holds no weights"):
            engine.fingerprint()
        await engine.load(trainer.weights(), 1)
        assert engine.version == 1 and engine.fingerprint() == trainer.fingerprint()
        assert engine.fingerprint() == weights_fingerprint(trainer.fetch_weights())

        told = []
        samples = await engine.generate(request_of(samples=4), lambda sample: told.append((sample, time.monotonic())))
        assert [sample.index for sample in samples] == [0, 1, 2, 3]
        assert [sample.versions for sample in samples] == [((1, 1),)] * 4
        assert [sample for sample, _ in told] == list(samples)
        assert told[-1][1] - told[0][1] > 0.3, "each is told when it is finished, not when all are"
        together = await asyncio.gather(*(engine.generate(request_of(samples=2)) for _ in range(20)))
        assert all(len(samples) == 2 for samples in together)

        with pytest.raises(DataError, match="no room for a response"):
            await engine.generate(request_of("refuse"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.generate(request_of(samples=100))
        (sample,) = await engine.generate(request_of("cancelled?"))
        assert sample.index == 1, "the engine was told that nobody waits any more"

        waiting = asyncio.create_task(engine.generate(request_of(samples=50)))
        await asyncio.sleep(0.2)
        with pytest.raises(EngineError, match=r"sampling: engine-0 died"):
            await engine.generate(request_of("die"))
        with pytest.raises(EngineError, match=r"engine-0 died"):
            await waiting
        with pytest.raises(EngineError, match=r"engine-0 died"):
            await engine.load(trainer.weights(), 2)
        await engine.close()
        await engine.close()

    asyncio.run(run())
    with pytest.raises(DataError, match="rank 1 refuses"):
        trainer.update(Orders({1: "refuse"}), None)
    for failure, said in FAILED.items():
        with pytest.raises(ClusterError, match=f"(?s)update: trainer rank 1{said}") as raised:
            trainer.update(Orders({1: failure}), None)
        assert lost_process(raised.value) is not None, "so the trainer is started again"
    with pytest.raises(ClusterError, match="update: trainer rank 1 died"):
        trainer.update(Orders({0: "stumble", 1: "die"}), None)  # the one who lost its peer is heard first
    trainer.close()
    assert gone("TrainerRank") and gone("EngineActor")


def test_who_is_stuck_is_named_and_ended(cluster):
    trainer = make_trainer(cluster, ranks=1, timeout_s=1.0)

    async def run():
        engine = make_engine(cluster, device=1, timeout_s=1.0)
        await engine.build(toy_engine, timeout_s=120)
        with pytest.raises(EngineError, match="sampling: no answer from engine-1 within 3 s"):
            await engine.generate(request_of("hang"))
        await engine.close()

    asyncio.run(run())
    with pytest.raises(ClusterError, match="update: no answer from trainer rank 0 within 1 s"):
        trainer.update(Orders({0: "hang"}), None)
    trainer.close()
    assert gone("TrainerRank") and gone("EngineActor")


def test_a_heartbeat_is_answered_during_a_computation_and_not_by_a_process_that_is_stopped_or_holds_pythons_lock(
    cluster,
):
    trainer = make_trainer(cluster, ranks=2, timeout_s=120.0)
    computing, holding = trainer._groups[0].ranks.values()
    pids = [ray.get(rank.ping.remote()).pid for rank in (computing, holding)]
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(trainer.update, Orders({0: "hang", 1: "hold"}), None)
        time.sleep(1)
        assert ray.get(computing.ping.remote(), timeout=30).pid == pids[0]
        with pytest.raises(GetTimeoutError):
            ray.get(holding.ping.remote(), timeout=3)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(GetTimeoutError):
            ray.get(computing.ping.remote(), timeout=3)
        kill(holding, "It answered no heartbeat.")
        with pytest.raises(ClusterError, match=r"update: trainer rank 1 died. It answered no heartbeat.$"):
            update.result()
    trainer.close()
    assert gone("TrainerRank"), "the stopped one too"
