"""The acceptance run's part with pictures in vLLM, on a CPU. Real vLLM, and torchvision (`test_vllm_pictures.py`)."""

from importlib.util import find_spec

import pytest
import torch

from hone.tools.acceptance.engines import SEEING, pictures
from hone.tools.acceptance.setting import PartSetting

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision: make test-vllm"),
]


def test_vllm_sees_what_the_trainer_sees():
    found = list(pictures(PartSetting(torch.device("cpu"), tiny=True)))
    cases = [f"{kind}, {count} pictures, vllm, float32" for kind in SEEING for count in (0, 1, 3)]
    assert [one.case for one in found] == cases
    assert all(one.name == "gate_gap" and one.as_dict(is_gpu=False)["holds"] for one in found), found
