"""Records of routing on their way from engines to ranks, with real processes of Ray's: they do not come here."""

import asyncio
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from ray._private.worker import global_worker
from ray_processes import make_engine, processes, toy_cluster
from ray_toys import experts_of, hash_of, routed_engine, routed_trainer
from raylets import rays_folder

import hone
from hone.cluster.actors import TrainerRank
from hone.cluster.ranks import RankGroup
from hone.cluster.stored import RecordInStore
from hone.cluster.trainer import RemoteTrainer
from hone.data.pack import collate
from hone.errors import EngineError
from hone.rollout.engine import Request, Sampling
from hone.types import Group, Prompt

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow("starts Ray")]

BYTES_EACH = 48 * 8
"""Of a token's record."""
PROMPT = tuple(range(20))


@pytest.fixture(scope="module")
def cluster():
    with toy_cluster() as cluster:
        yield cluster


def request_of(index=0, *, samples=4, tokens=200, **more):
    sampling = Sampling(tokens, 1.0, 0, 1.0, 0.0, (), ())
    return Request(Prompt(f"p{index}", index, "", PROMPT), samples, sampling, 0, "train", **more)


async def group_of(engine, request):
    samples = []
    await engine.generate(request, samples.append)
    return Group(request.prompt, tuple(samples)).scored({}, (1.0,) * len(samples))


def drawn(cluster, *requests, then=None):
    """Groups of an engine, which is ended `then`, or closed."""

    async def draw():
        engine = make_engine(cluster, 2)
        await engine.build(routed_engine, timeout_s=120)
        groups = [await group_of(engine, request) for request in requests]
        if then is not None:
            then()
            with pytest.raises(EngineError, match="died"):
                await engine.generate(request_of())
        await engine.close()
        return groups

    return asyncio.run(draw())


@pytest.fixture(scope="module")
def trainer(cluster):
    actors = [cluster.spawn(TrainerRank, 60.0, devices=[number], shared_by=2) for number in range(2)]
    trainer = RemoteTrainer(RankGroup("trainer", actors, routed_trainer), timeout_s=60, bucket_size=1024)
    trainer.start(is_one_machine=True, timeout_s=120)
    yield trainer
    trainer.close()


def expected_of(groups):
    each = [experts_of(group.prompt.index, s.index, len(s.token_ids)) for group in groups for s in group.samples]
    prompts = [experts_of(group.prompt.index, -1, len(PROMPT)) for group in groups]
    return [hash_of(np.concatenate(each)), *map(hash_of, prompts)]


def test_the_controller_receives_no_records_and_ranks_fetch_them(cluster, trainer):
    (group,) = drawn(cluster, request_of(tokens=500))
    tokens = sum(len(sample.token_ids) for sample in group.samples)
    by_reference = len(pickle.dumps(group.samples)) / tokens
    whole = [(s.routing.get(), s.prompt_routing and s.prompt_routing.get()) for s in group.samples]
    by_value = by_reference + len(pickle.dumps(whole)) / tokens
    print(f"bytes a token: {by_value:.1f} with records, {by_reference:.1f} with references")
    assert by_reference < 10 and by_value > BYTES_EACH
    assert trainer.logprobs(collate([group])) == expected_of([group])


def test_records_outlive_the_engine_that_made_them(cluster, trainer):
    def kill():
        (engine,) = processes("EngineActor")
        os.kill(engine.pid, signal.SIGKILL)

    groups = drawn(cluster, request_of(0), request_of(1), then=kill)
    assert trainer.logprobs(collate(groups)) == expected_of(groups)
    assert trainer.update(collate(groups), None) == {"fetched": True}


def test_short_records_come_with_the_samples(cluster, trainer):
    """Ray keeps results below 100 KiB out of its object store; nothing is lost or taken for lost."""
    groups = drawn(cluster, request_of(tokens=2, samples=1))
    assert trainer.logprobs(collate(groups)) == expected_of(groups)


def test_of_a_later_turn_only_the_records_that_are_not_known_are_kept(cluster):
    (group,) = drawn(cluster, request_of(samples=1, num_routed=15))
    found = group.samples[0].prompt_routing.get()
    assert (found[:15] == -1).all() and np.array_equal(found[15:], experts_of(0, -1, len(PROMPT))[15:])
    (_, kept) = group.samples[0].prompt_routing.spans
    assert len(kept.source()) == 5


def test_records_lost_with_a_machine_are_left_out_and_a_rank_that_asks_for_them_fails_at_once(tmp_path):
    """The rest of the batch is trained on; ranks never wait for what is gone."""
    folders = [str(Path(__file__).parent), str(Path(hone.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with rays_folder() as short:
        extra = {"PYTHONPATH": os.pathsep.join(folders), "RAY_TMPDIR": str(short), "RAY_USAGE_STATS_ENABLED": "0"}
        program = [sys.executable, str(Path(__file__).parent / "lost_machine.py")]
        ended = subprocess.run(
            program, env={**os.environ, **extra}, cwd=tmp_path, capture_output=True, text=True, timeout=400
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["before"] == 0
    assert found["after"] == 3 * (4 * 200 + len(PROMPT)) and found["left"] == 0
    assert found["error"] == "ObjectReconstructionFailedError" and found["seconds"] < 30


def held_objects():
    return set(global_worker.core_worker.get_all_reference_counts())


def stored_bytes():
    """In the object store of this machine."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def test_nothing_is_left_of_records_that_nobody_needs_any_more(cluster, trainer):
    async def steps(count):
        for _ in range(count):
            groups = await asyncio.gather(*(group_of(engine, request_of(index)) for index in range(3)))
            batch = collate(groups)
            assert all(isinstance(span.source, RecordInStore) for span in batch.routing_T.spans)
            assert await asyncio.to_thread(trainer.update, batch, None) == {"fetched": True}
            most.append(stored_bytes())

    async def main():
        nonlocal engine
        engine = make_engine(cluster, 3)
        await engine.build(routed_engine, timeout_s=120)
        await steps(3)
        before = settled()
        await steps(30)
        assert settled() == before and before[1] == 0
        await engine.close()

    def settled():
        """Objects and bytes, once Ray has heard of all that is free."""
        gc.collect()
        found, deadline = None, time.monotonic() + 30
        while time.monotonic() < deadline:
            found = len(held_objects()), stored_bytes()
            if found[1] == 0:
                break
            time.sleep(0.2)
        return found

    engine, most = None, []
    asyncio.run(main())
    assert max(most) >= 3 * 4 * 200 * BYTES_EACH, "the records of a step were really there"
