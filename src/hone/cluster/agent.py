"""`python -m hone.cluster.agent COMMAND ...` becomes the command, an agent of Ray's, and is killed with the raylet."""

import os
import sys

from hone.runtime.processes import end_with

if __name__ == "__main__":
    end_with(int(os.environ["RAY_RAYLET_PID"]))
    os.execvp(sys.argv[1], sys.argv[1:])
