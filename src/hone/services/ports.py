"""Ports of this machine: free ones, and the process that holds one."""

from __future__ import annotations

import socket

import psutil

HOST = "127.0.0.1"


def free_port(host: str = HOST) -> int:
    """A free port. The kernel's order makes it unlikely that another process gets the same one."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


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
