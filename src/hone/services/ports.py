"""Ports of this machine: free ones, and the process that holds one."""

from __future__ import annotations

import contextlib
import random
import socket

import psutil

HOST = "127.0.0.1"
OURS = range(20_000, 32_768)
"""Linux gives connections, and servers that ask for any port, ports from 32,768 on: here none is taken meanwhile."""


def free_port(host: str = HOST) -> int:
    """A free port of `OURS`, drawn at random, so that two processes hardly choose the same.

    Raises:
        OSError: the host's address is not of this machine, or its ports are taken.
    """
    *others, last = random.SystemRandom().sample(OURS, 100)
    for port in others:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, last))
        return last


def is_free(port: int) -> bool:
    """Whether a server could listen on the port; connections that are still closing do not keep it from that.

    Raises:
        PermissionError: ports below 1024 are for root.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """Who listens on a port, for people: `process 4711 (python server.py)`, as far as this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                command = " ".join(psutil.Process(connection.pid).cmdline()) if connection.pid else "another user's"
                return f"process {connection.pid or '?'} ({command[:80]})"
    except psutil.Error:
        pass
    return "another process"
