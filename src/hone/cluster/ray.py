"""Ray cluster of a run: started here or joined, its devices reserved in a placement group, actors spawned on them.

A run reserves its devices at once, in one placement group: it has all of them or waits, and two runs never hold half of
what each needs. A device is an accelerator, or on machines without any a core. Not here: what the processes do
(`actors.py`), and which role has which device (`config.topology`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hone.cluster import agent
from hone.config.cluster import ClusterSection
from hone.devices import RESOURCES, Accelerator, machine_kind
from hone.errors import ClusterError, ClusterLost, PlacementError, Stopped, first_line
from hone.runtime.processes import end_with, environment_restored
from hone.runtime.scratch import Scratch

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

T = TypeVar("T")

HEARTBEAT = "heartbeat"
"""Concurrency group of an actor's `ping`."""
_AUTH_MODE = "RAY_AUTH_MODE"
"""Set by a `ray.init` that starts Ray, and to show a token."""
_POLL_S = 1.0
"""How long Ctrl-C may have to wait while devices are not there yet."""
_CONNECT_S = 5.0
"""How long Ray's own processes may take to accept a connection."""
_SHARE = 0.01
"""Share of a core that an actor on a GPU reserves: Ray would count 0 as 1."""


class RayCluster:
    """A running Ray with this run's devices in it, from `start` to `close`.

    All talk with Ray that starts something happens on a thread of its own. Linux ends Ray's processes with the thread
    that started them, and on the main thread Ray would take SIGTERM for itself.

    Args:
        settings: the `cluster` section.
        name: of the run; shown to other runs that wait for the devices.
        resource: what Ray calls a device of the run: GPU, NPU, or CPU, where each is a core.
        num_devices: of the run.
        say: takes messages for the console.
    """

    def __init__(
        self, settings: ClusterSection, *, name: str, resource: str, num_devices: int, say: Callable[[str], None]
    ) -> None:
        self._settings, self._name, self._say = settings, name, say
        self._kind, self._num_devices = resource, num_devices
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._folder: Scratch | None = None
        self._group: PlacementGroup | None = None
        self._places: list[int] = []
        """Bundle of each device."""
        self._nodes: list[str] = []
        """Machine of each device, by Ray's name for it."""

    @property
    def is_own(self) -> bool:
        """Whether Ray was started here, so that all processes are on this machine."""
        return self._settings.address is None

    def start(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Start or join Ray, and wait until the run's devices are its own.

        Args:
            stopped: whether the user has stopped the run meanwhile.
        Raises:
            PlacementError: the machine does not have them.
            ClusterError: no Ray at `cluster.address`, or devices that did not become free in time.
            Stopped: the user ended the wait.
        """
        self._on_thread(self._connect)
        self._on_thread(lambda: self._reserve(stopped))

    def machines(self) -> list[dict[str, float]]:
        """Ray's resources of each machine. Raises ClusterError: no Ray at `cluster.address`."""
        import ray

        self._on_thread(self._connect)
        return self._on_thread(lambda: [node["Resources"] for node in ray.nodes() if node["Alive"]])

    def close(self) -> None:
        """Give the devices back and end what was started here. May be called twice."""
        import ray

        def close() -> None:
            # A Ray of this run's own ends with all that is in it; one that is lost would be waited for.
            if self._group is not None and ray.is_initialized() and not self.is_own and lost() is None:
                with contextlib.suppress(Exception):  # boundary: the cluster may be gone, and so are the devices then
                    ray.util.remove_placement_group(self._group)
            ray.shutdown()

        self._on_thread(close)
        self._thread.shutdown()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def is_whole(self) -> bool:
        """Whether all machines with devices of the run are still there. Raises ClusterLost when Ray itself is not."""
        import ray

        if (why := lost()) is not None:
            raise ClusterLost(why)

        try:
            return self._on_thread(
                lambda: set(self._nodes) <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            )
        except Exception:  # boundary: of a Ray that is gone everything fails, in ways of its own
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def spawn(
        self,
        actor: type,
        *args: Any,
        devices: Sequence[int],
        shared_by: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Start a process that is `actor`, on devices of this run; its handle.

        Args:
            devices: where it works, counted from 0 over all pools; all are on one machine.
            shared_by: how many processes take turns on each of them.
            env: of the process, besides what it inherits.
        """
        import ray

        nodes = {self._nodes[device] for device in devices}
        if len(nodes) > 1:
            raise PlacementError(
                f"devices {devices[0]} to {devices[-1]} are on {len(nodes)} machines, and one engine cannot span them. "
                "Give every machine as many devices as cluster.devices_per_node says."
            )
        bundle = self._at(self._places[devices[0]])
        options: dict[str, Any] = {"num_cpus": _SHARE, "max_restarts": 0, "scheduling_strategy": bundle}
        if hasattr(actor, "ping"):  # answered on a thread of its own, whatever the process computes
            options["concurrency_groups"] = {HEARTBEAT: 1}
        environment = dict(env or {})
        if self._kind == "CPU":
            options["num_cpus"] = 1 / shared_by
        elif len(devices) == 1:
            options |= self._request(1 / shared_by)
        else:  # Ray would divide such a request over devices of its own choice
            environment |= self._on_thread(lambda: self._seeing(devices))
        if environment:
            options["runtime_env"] = {"env_vars": environment}
        return self._on_thread(lambda: ray.remote(**options)(actor).remote(*args))

    def _on_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _at(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    # ---- on the thread

    def _request(self, share: float) -> dict[str, Any]:
        """Options of an actor that takes this share of an accelerator."""
        return {"num_gpus": share} if self._kind == "GPU" else {"resources": {self._kind: share}}

    def _seeing(self, devices: Sequence[int]) -> dict[str, str]:
        """Environment of a process that sees these devices, which are on one machine, by the names of its driver."""
        import ray

        resource = self._kind

        def look() -> tuple[Accelerator, list[str]]:
            return machine_kind(), ray.get_runtime_context().get_accelerator_ids()[resource]

        looking = ray.remote(num_cpus=_SHARE, **self._request(_SHARE))(look)
        asked = [looking.options(scheduling_strategy=self._at(self._places[device])).remote() for device in devices]
        found = ray.get(asked, timeout=self._settings.start_timeout_s)
        kind = found[0][0]
        listed = ",".join(name for _, names in found for name in names)
        return {kind.variable: listed, f"RAY_EXPERIMENTAL_NOSET_{kind.variable}": "1"}  # and Ray does not set it

    def _connect(self) -> None:
        address, cores = self._settings.address, len(os.sched_getaffinity(0))
        import ray
        from ray._private import auto_init_hook

        # By default a call without a connection, such as one after the end of this Ray, starts a Ray of its own.
        auto_init_hook.enable_auto_connect = False
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": self._name}
        if address is not None:
            try:
                with environment_for_ray():
                    try:
                        ray.init(address=address, **quiet)
                    except ConnectionError:
                        if not _shows_token():
                            raise
                        ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"cluster.address = {address}: there is no Ray to join ({first_line(error)}). Start one with "
                    "`ray start --head` there, or take the key out to have one started on this machine. One that wants "
                    "a token is joined with the token that it was started with, at RAY_AUTH_TOKEN_PATH or in "
                    "~/.ray/auth_token."
                ) from error
            return
        self._folder = Scratch("hone-ray-")
        own = {"num_gpus": 0, "num_cpus": max(cores, self._num_devices)} if self._kind == "CPU" else {"num_cpus": cores}
        try:
            with environment_for_ray(), _on_loopback(), _apart():
                ray.init(address="local", include_dashboard=False, _temp_dir=str(self._folder.path), **own, **quiet)
        except Exception as error:  # boundary: on a busy machine Ray raises a plain one after its own 30 s
            raise ClusterError(f"Ray could not be started on this machine: {first_line(error)}") from error

    def _reserve(self, stopped: Callable[[], bool]) -> None:
        """Wait for the run's devices, all at once."""
        import ray

        each = {"CPU": 1.0} if self._kind == "CPU" else {self._kind: 1.0, "CPU": 0.1}
        have = int(ray.cluster_resources().get(self._kind, 0))
        if self.is_own and have < self._num_devices:
            raise PlacementError(
                f"the run's pools have {self._num_devices} devices, this machine has {have} {self._kind}s. Make the "
                "pools smaller, or join a larger cluster with cluster.address."
            )
        group = self._group = ray.util.placement_group([each] * self._num_devices, strategy="PACK", name=self._name)
        deadline_s, waited_s = self._settings.start_timeout_s, 0.0
        while not group.wait(_POLL_S):
            waited_s += _POLL_S
            if stopped():
                raise Stopped("stopped while waiting for devices; nothing was trained")
            if waited_s == 5 * _POLL_S:
                self._say(f"waiting for {self._num_devices} {self._kind}s, at most {deadline_s:g} s; {_holders()}")
            if waited_s >= deadline_s:
                raise ClusterError(
                    f"{self._num_devices} {self._kind}s were not free within cluster.start_timeout_s = {deadline_s:g} "
                    f"s; {_holders()}. Wait for them, or make the pools smaller."
                )
        where: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        order = {node: number for number, node in enumerate(dict.fromkeys(where[i] for i in sorted(where)))}
        self._places = sorted(where, key=lambda bundle: (order[where[bundle]], bundle))
        self._nodes = [where[bundle] for bundle in self._places]


def machines_of(settings: ClusterSection) -> list[dict[str, float]]:
    """Ray's resources of each machine of the cluster at `cluster.address`, which is left again.

    Raises:
        ClusterError: there is no Ray to join.
    """
    with environment_for_ray():
        cluster = RayCluster(settings, name="hone", resource="CPU", num_devices=0, say=print)
        try:
            return cluster.machines()
        finally:
            cluster.close()


def _shows_token() -> bool:
    """Have Ray show its token to the cluster that it joins; whether there is one that it did not show before.

    `ray start` asks for a token where it finds one, and a `ray.init` that starts Ray leaves one in the home directory;
    but a `ray.init` that joins shows none unless RAY_AUTH_MODE says so, and does not learn why it failed. To one that
    wants none it must not be shown: its actors would never start. Before 2.60 only RAY_AUTH_MODE had any asked for.
    """
    try:
        from ray._private.authentication import authentication_token_setup

        logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
        enable = authentication_token_setup.maybe_enable_token_auth_if_token_available
    except (ImportError, AttributeError):
        return False
    return _AUTH_MODE not in os.environ and enable(warn_if_disabled=False)


def raylet_lost() -> str | None:
    """Why this machine's raylet is taken for dead, if it is. It has the object store, whose next use would end this
    process without a word."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is None:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(node.raylet_socket_name)
    except OSError as error:
        return f"Ray is lost: the raylet of this machine does not answer ({error.strerror or error})."
    return None


def lost() -> str | None:
    """Why Ray is taken for dead, if it is: this machine's raylet or the GCS takes no connection, or the GCS has given
    the raylet up. Without a GCS calls to actors still succeed for a minute; then Ray ends its processes, and this one
    without a word."""
    import ray
    from ray._private import worker
    from ray.exceptions import RaySystemError

    node: Any = worker._global_node
    why = raylet_lost()
    if why is not None or node is None:
        return why
    host, _, port = node.gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        return f"Ray is lost: the GCS at {node.gcs_address} does not answer ({error.strerror or error})."
    try:
        own = ray.get_runtime_context().get_node_id()
        alive = any(each["Alive"] for each in ray.nodes() if each["NodeID"] == own)
    except RaySystemError:  # another thread has disconnected meanwhile
        return "Ray is lost: this process is not connected any more."
    if not alive:
        return "Ray is lost: the raylet of this machine has ended, or is about to."
    return None


def end_with_ray() -> None:
    """The first thing in a process of Ray's: it ends when Ray on its machine does. By itself it would first wait for
    its threads, and one that waits for weights or for other ranks may do so for `cluster.call_timeout_s`."""
    parent = os.getppid()

    def stay() -> None:
        end_with(parent)
        threading.Event().wait()  # Linux forgets it with the thread that asked

    threading.Thread(target=stay, name="end-with-ray", daemon=True).start()


def own_address() -> str:
    """Address of this machine for the cluster's other machines."""
    import ray

    return ray.util.get_node_ip_address()


def restore_sigterm() -> None:
    """Restore the SIGTERM handler from before Ray began: Ray's own way is to show a stack and abort 3 s later.

    To be called on the main thread once Ray is there.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray's processes that start meanwhile listen on the loopback alone; by themselves they do so only where Ray knows
    no clusters. What this process starts later may join one, without knowing of it."""
    from ray._private import ray_constants

    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def environment_for_ray() -> Iterator[None]:
    """What Ray and this module set in the environment meanwhile is for Ray's processes; afterwards it is as before, so
    that processes that this one starts later do not inherit it. Importing Ray sets variables too."""
    with environment_restored():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's own 15 is for tasks beside a driver that computes; ranks and engines would wait for every other program.
        os.environ.setdefault("RAY_worker_niceness", "0")
        yield


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Ray's processes that start meanwhile do not get the signals of the run's process group. A terminal sends
    Ctrl-C there, a scheduler its SIGTERM, and without Ray the run could not save a checkpoint any more. The raylet's
    agents end with it: by themselves they would first try for a minute to report to a GCS, which is gone too."""
    from ray._private import services

    start = services.ConsolePopen
    ending = subprocess.list2cmdline([sys.executable, "-m", agent.__name__])

    def start_apart(command: Sequence[str], **options: Any) -> Any:
        words = [word.replace("_agent_command=", f"_agent_command={ending} ", 1) for word in command]
        return start(words, start_new_session=True, **options)

    services.ConsolePopen = start_apart  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = start


def _holders() -> str:
    """Which processes hold the cluster's devices, for people."""
    import ray
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    machines = []
    for node in ray.nodes():
        if node["Alive"]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            kinds = (
                f"{left.get(kind, 0):g} of {total[kind]:g} {kind}s" for kind in (*RESOURCES, "CPU") if kind in total
            )
            machines.append(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}): {', '.join(kinds)} free")
    held = []
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            wanted = Counter[str]()
            for bundle in group["bundles"].values():
                wanted.update({kind: int(count) for kind, count in bundle.items() if count >= 1})
            held.append(f"{group['name'] or 'a job'} holds {', '.join(f'{n} {kind}s' for kind, n in wanted.items())}")
    return "; ".join([*machines, *(held or ["no placement group holds any"])])
