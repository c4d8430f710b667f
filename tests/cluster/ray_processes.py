"""Not a test: a Ray of this process with toys in it, and the processes that it has."""

from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hone.cluster.actors import EngineActor
from hone.cluster.engine import RemoteEngine
from hone.cluster.ray import RayCluster
from hone.config.cluster import ClusterSection


@contextmanager
def toy_cluster():
    """Four devices, and actors that find the toys."""
    with (
        pytest.MonkeyPatch.context() as patch,
        RayCluster(ClusterSection(backend="ray"), name="first", resource="CPU", num_devices=4, say=print) as cluster,
    ):
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        cluster.start()
        yield cluster


def make_engine(cluster, device=0, timeout_s=30.0):
    return RemoteEngine(
        f"engine-{device}", cluster.spawn(EngineActor, devices=[device], shared_by=2), timeout_s=timeout_s
    )


def processes(actor):
    """Those of this test's actors that are of one kind; Ray names a process after what it does."""
    return [p for p in psutil.Process().children(recursive=True) if f"ray::{actor}" in " ".join(words_of(p))]


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def gone(actor):
    return not psutil.wait_procs(processes(actor), timeout=10)[1]
