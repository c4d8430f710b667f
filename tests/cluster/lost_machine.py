"""Not a test: a program whose engine is on a machine of its own, which it loses; prints what becomes of the records."""

import asyncio
import json
import time

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray_toys import routed_engine
from test_ray_routing import group_of, request_of

from hone.cluster.actors import EngineActor
from hone.cluster.engine import RemoteEngine
from hone.cluster.ray import HEARTBEAT
from hone.cluster.stored import without_lost
from hone.data.pack import collate


async def drawn():
    actor = ray.remote(concurrency_groups={HEARTBEAT: 1})(EngineActor)
    engine = RemoteEngine("engine-0", actor.options(resources={"other": 1}).remote(), timeout_s=120)
    await engine.build(routed_engine, timeout_s=120)
    return [await group_of(engine, request_of(index)) for index in range(3)]


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    other = cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    batch = collate(asyncio.run(drawn()))
    found = {"before": without_lost(batch)[1]}
    cluster.remove_node(other, allow_graceful=False)
    deadline = time.monotonic() + 120
    while (left := without_lost(batch))[1] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    rest, found["after"] = left
    records = [experts.get() for experts in (rest.routing_T, *rest.prompt_routing)]
    found["left"] = sum(0 if record is None else int(np.any(record >= 0)) for record in records)
    began = time.monotonic()
    try:
        batch.routing_T.get()
    except ray.exceptions.RayError as error:
        found |= {"error": type(error).__name__, "seconds": time.monotonic() - began}
    print(json.dumps(found), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
