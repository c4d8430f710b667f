"""Table of the acceptance run's parts, and the process that runs one of them.

python -m hone.tools.acceptance.parts PART LINES.jsonl [--tiny]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hone.assemble.job import set_up_arithmetic
from hone.config.run import RunSection
from hone.tools.acceptance.arithmetic import attention, deterministic, devices, kernels, numbers
from hone.tools.acceptance.classes import classes, transformers
from hone.tools.acceptance.decoding import decoding
from hone.tools.acceptance.engines import engines, pictures, sleeping
from hone.tools.acceptance.figures import Figure, append
from hone.tools.acceptance.first_run import gsm8k
from hone.tools.acceptance.publishing import publishing
from hone.tools.acceptance.ranks import export, several
from hone.tools.acceptance.runs import cluster_part, run
from hone.tools.acceptance.setting import PartSetting
from hone.tools.acceptance.trainers import modes, passes_part, trainer_part

PARTS: Mapping[str, Callable[[PartSetting], Iterator[Figure]]] = {
    "devices": devices,
    "numbers": numbers,
    "deterministic": deterministic,
    "attention": attention,
    "kernels": kernels,
    "trainer-0.6b": trainer_part("0.6b"),
    "trainer-1.7b": trainer_part("1.7b"),
    "trainer-4b": trainer_part("4b"),
    "trainer-8b": passes_part("8b"),
    "modes": modes,
    "transformers": transformers,
    "classes": classes,
    "decoding": decoding,
    "engines": engines,
    "export": export,
    "publishing": publishing,
    "gsm8k": gsm8k,
    "run": run,
    "cluster-hone": cluster_part("hone"),
    "cluster-vllm": cluster_part("vllm"),
    "several": several,
    "sleeping": sleeping,
    "pictures": pictures,
}


def main(arguments: Sequence[str]) -> None:
    """Run one part, and append each figure as soon as it is there."""
    part, lines, *flags = arguments
    setting = PartSetting(set_up_arithmetic(RunSection()), tiny="--tiny" in flags)
    append(Path(lines), PARTS[part](setting), is_gpu=setting.is_gpu)


if __name__ == "__main__":
    main(sys.argv[1:])
