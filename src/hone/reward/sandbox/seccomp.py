"""Seccomp filter of the sandbox.

Left out on purpose are memory that no limit counts (shared memory segments, memfd), looking into other processes,
setting their limits, namespaces inside the sandbox, and parts of the kernel with a long record of holes. The rest of a
program's calls are unaffected; a refused call fails with EPERM.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_NEW_NAMESPACE = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_X32_BIT = 0x40000000
_CLONE3 = 435
_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd, mount_setattr, memfd_secret."""
_REFUSED = {
    # ptrace, shmget, shmat, shmctl, semget, msgget, process_vm_readv, process_vm_writev, memfd_create, unshare, setns,
    # mount, umount2, pivot_root, chroot, keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, kexec_load,
    # init_module, finit_module, open_by_handle_at, name_to_handle_at, personality, kcmp
    "x86_64": (
        *(101, 29, 30, 31, 64, 68, 310, 311, 319, 272, 308, 165, 166, 155, 161, 250, 248, 249, 321, 298, 323, 246),
        *(175, 313, 304, 303, 135, 312),
    ),
    "aarch64": (
        *(117, 194, 196, 195, 190, 186, 270, 271, 279, 97, 268, 40, 39, 41, 51, 219, 217, 218, 280, 241, 282, 104),
        *(105, 273, 265, 264, 92, 272),
    ),
}
_OWN_PROCESS_ONLY = {"x86_64": (302, 203, 144, 142, 314), "aarch64": (261, 122, 119, 118, 274)}
"""prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: not those of the warden, which is a
process of the same user. Their first argument is a process, 0 being the caller."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter as the kernel takes it (classic BPF); None for a machine whose calls are not known here."""
    machine = machine or platform.machine()
    if machine not in _REFUSED:
        return None
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer; the C library falls back to clone
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in (*_REFUSED[machine], *_COMMON):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    for number in _OWN_PROCESS_ONLY[machine]:
        program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_EQUAL, 0, 1, 0)]
        program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    program += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
