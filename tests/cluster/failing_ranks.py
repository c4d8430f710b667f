"""Not a test: ranks of a run of which one runs out of memory, once in a run; for processes of Ray's."""

from contextlib import contextmanager
from pathlib import Path

import torch

from hone.assemble.processes import rank

FAILING_RANK = 1


@contextmanager
def ranks_of_which_one_fails(spec, processes, make, seat):
    """As `hone.assemble.processes.rank`."""
    with rank(spec, processes, make, seat) as held:
        if seat.rank == FAILING_RANK:
            fail_in_the_middle(held, Path(spec.run_dir) / "has_failed")
        yield held


def fail_in_the_middle(held, mark):
    """The second layer's first pass of an update: the others have its weights gathered, and wait for the next."""

    def refuse(*_):
        if held.passes.guard.meter.open_phase == "update" and not mark.exists():
            mark.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    held.policy.model.layers[1].register_forward_pre_hook(refuse)
