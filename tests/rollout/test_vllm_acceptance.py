"""Parts of the acceptance run with vLLM, with tiny shapes on a CPU."""

import pytest
import torch

from hone.tools.acceptance.engines import engines, sleeping
from hone.tools.acceptance.setting import PartSetting

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


def figures(part):
    """Values of each figure, in order, where no expectation is missed."""
    found = {}
    for figure in part(PartSetting(torch.device("cpu"), tiny=True)):
        assert figure.as_dict(is_gpu=False)["holds"] is not False, figure
        found.setdefault(figure.name, []).append(figure.value)
    return found


def test_an_engine_that_slept_has_the_weights_that_came_then():
    found = figures(sleeping)
    assert found["held_versions"] == [1, 1] and max(found["gate_gap"]) < 1e-4, "of other weights, then the first ones"
    assert found["left_out"] == [1] and "asleep_gib" not in found, "a CPU's memory is not freed"


def test_both_engines_draw_what_a_trainer_would():
    found = figures(engines)
    assert len(found["engine_tokens_per_s"]) == len(found["engine_step_ms"]) == 2 and max(found["gate_gap"]) < 1e-4
    assert found["engine_ratio"][0] > 0
