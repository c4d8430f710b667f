"""From a resolved run file to a running job: the only package that names concrete backends.

Heavy: it imports torch and everything below. The command line imports it only once a run file is known to be right.
"""

from hone.assemble.stages import train
from hone.assemble.verbs import check_run, evaluate_run, export_run

__all__ = ["check_run", "evaluate_run", "export_run", "train"]
