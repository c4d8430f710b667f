"""The end of Ray's own processes, in a file of its own because no test can use that Ray afterwards."""

import asyncio

import psutil
import pytest
from ray_processes import make_engine, processes, toy_cluster, words_of
from ray_toys import toy_engine

from hone.weights.publish import Update


@pytest.mark.timeout(600)
@pytest.mark.slow("starts Ray")
def test_processes_end_with_ray_whatever_their_threads_wait_for():
    async def wait_for_weights(cluster):
        engine = make_engine(cluster, device=2, timeout_s=600.0)
        await engine.build(toy_engine, timeout_s=120)
        await engine._actor.begin_weights.remote(Update("first", version=1))

    with toy_cluster() as cluster:
        asyncio.run(wait_for_weights(cluster))
        (waiting,) = processes("EngineActor")
        assert waiting.num_threads() > 1
        children = psutil.Process().children(recursive=True)
        (raylet,) = [p for p in children if "raylet/raylet" in " ".join(words_of(p)[:1])]
        assert waiting.ppid() == raylet.pid
        raylet.kill()
        assert not psutil.wait_procs([waiting], timeout=10)[1]
