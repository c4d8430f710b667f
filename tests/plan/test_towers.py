"""Vision towers in a plan: counts are those of Transformers' classes, and bounds those of the code that computes."""

from pathlib import Path

import pytest
import torch
from model_zoo import OTHERS
from pictures import SEEING
from transformers import AutoConfig, AutoModelForImageTextToText

from hone.config.load import load_config
from hone.errors import DataError
from hone.model import vision
from hone.plan import local
from hone.plan.architecture import architecture_from
from hone.plan.hardware import find_hardware
from hone.plan.planner import plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "pictures" / "run.yaml"


@pytest.mark.parametrize("kind", SEEING)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_the_class(kind, tied):
    keys = {**OTHERS[kind], "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, **keys)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    arch = architecture_from({"model_type": kind, **keys})
    tower = sum(weight.numel() for weight in model.base_model.visual.parameters())
    assert arch.tower is not None and arch.tower.parameters == tower
    assert arch.total_parameters == sum(weight.numel() for weight in model.parameters()) - tower


def test_the_tower_of_a_published_model():
    """Qwen2.5-VL-7B's config.json, whose language model's keys are its own."""
    vision_config = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    text |= {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000}
    arch = architecture_from({"model_type": "qwen2_5_vl", **text, "vision_config": vision_config})
    assert arch.tower is not None and arch.tower.parameters == 676_550_144
    assert arch.total_parameters == 7_615_616_512


def test_a_width_that_is_missing_is_named():
    with pytest.raises(DataError, match=r"vision_config.depth must be a whole number"):
        architecture_from({"model_type": "qwen3_vl", **OTHERS["qwen3_vl"], "vision_config": {}})


def test_bounds_are_those_of_the_model():
    assert (vision.PATCHES_PER_PASS, vision.KEPT_BYTES) == (local.PATCHES_PER_PASS, local.KEPT_FEATURES_BYTES)


def planned(*overrides):
    loaded = load_config(EXAMPLE, overrides)
    found = plan(loaded.config, find_hardware("T4-16G"), folder=EXAMPLE.parent)
    return {one.name: one.bytes for ledger in found.ledgers for moment in ledger.moments for one in moment.terms}


def test_a_frozen_tower_takes_less():
    trained, frozen = planned(), planned("model.freeze=[vision]")
    count = trained["vision tower: master weights"] // 4
    assert frozen["vision tower"] == 4 * count and trained["tower activations"] > 0
    assert "vision tower: gradient" not in frozen and "tower activations" not in frozen
    copied = planned("model.freeze=[vision]", "algorithm.kl_loss_coef=0.1", "rollout.max_staleness=1")
    assert copied["vision tower, copies"] == 2 * 4 * count
