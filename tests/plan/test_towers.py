"""Vision towers in a plan: counts are those of Transformers' classes, memory is what torch's allocator hands out, and
bounds are those of the code that computes."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measuring import allocated
from model_zoo import OTHERS
from pictures import SEEING
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from hone.config.load import load_config
from hone.errors import DataError
from hone.model.recompute import contexts
from hone.model.towers import TOWERS as TOWER_CLASSES
from hone.plan import towers
from hone.plan.engine import EnginePlan, EngineSettings
from hone.plan.families import architecture_from
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
    tower = sum(weight.numel() for weight in TOWER_CLASSES[kind](model.base_model, config).weights())
    assert arch.tower is not None and arch.tower.parameters == tower
    assert arch.total_parameters == sum(weight.numel() for weight in model.parameters()) - tower


QWEN_7B = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}  # fmt: skip
"""Of config.json, whose language model's keys are its own."""


def test_the_tower_of_a_published_model():
    arch = architecture_from(QWEN_7B)
    assert arch.tower is not None and arch.tower.parameters == 676_550_144
    assert arch.total_parameters == 7_615_616_512


VARIANTS = {
    "biases": {"attention_bias": True},
    "rms norms": {"norm_type": "rms_norm", "use_qk_norm": True},
    "a last norm, no positions": {"use_mean_pooling": False, "use_absolute_position_embeddings": False},
}
"""InternVL's towers of 0.3 and 6 billion parameters differ in these keys."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_a_tower_of_tiles_is_counted(variant):
    keys = OTHERS["internvl"]
    keys = {**keys, "vision_config": {**keys["vision_config"], **VARIANTS[variant]}}
    config = AutoConfig.for_model("internvl", **keys)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tower = architecture_from({"model_type": "internvl", **keys}).tower
    assert tower is not None
    assert tower.parameters == sum(
        weight.numel() for weight in TOWER_CLASSES["internvl"](model.base_model, config).weights()
    )


# ---- memory

TOWERS = {
    "qwen2_5_vl": ({"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}, 32),
    "qwen2_vl": ({"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}, 32),
    "qwen3_vl": ({"hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096}, 27),
    "internvl": ({"hidden_size": 1024, "intermediate_size": 4096, "image_size": 14 * 24}, 24),
}
"""Of Qwen2.5-VL-7B, Qwen2-VL-7B, Qwen3-VL-8B and InternVL3-8B: widths, and how many blocks."""
SHALLOW, DEEPER, ROWS = 1, 3, 12


def tower_of(kind, depth, dtype):
    """Its tower with fewer blocks, all widths as they are."""
    if kind == "internvl":
        text = {"hidden_size": 3584, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
        keys = {**TOWERS[kind][0], "num_hidden_layers": depth}
        config = AutoConfig.for_model(kind, vision_config=keys, text_config=text)
        config._attn_implementation = "sdpa"
        return AutoModel.from_config(config, dtype=dtype)
    behind = {"qwen2_5_vl": {"fullatt_block_indexes": [0]}, "qwen3_vl": {"deepstack_visual_indexes": []}}.get(kind, {})
    keys = {**TOWERS[kind][0], "num_heads": 16, "depth": depth, **behind}
    config = AutoConfig.for_model(kind, vision_config=keys).vision_config
    config._attn_implementation = "sdpa"
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {"qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel", "qwen3_vl": "Qwen3VLVisionModel"}.get(
        kind, "Qwen2VisionTransformerPretrainedModel"
    )
    return getattr(module, name)._from_config(config, dtype=dtype)


def passes(kind, tower, config):
    """A call of the tower on `4 * ROWS**2` patches."""
    if kind == "internvl":
        pixels = torch.randn(1, 3, 28 * ROWS, 28 * ROWS)
        return lambda: tower.get_image_features(pixels, return_dict=True).pooler_output
    pixels, grid = torch.randn(4 * ROWS**2, 6 * config.patch_size**2), torch.tensor([[1, 2 * ROWS, 2 * ROWS]])
    return lambda: tower(pixels, grid_thw=grid).pooler_output


def peaks(kind, depth, dtype, checkpointing):
    """Most bytes of a pass without gradients, and of one forward and backward."""
    tower = tower_of(kind, depth, dtype).requires_grad_(False)
    compute = passes(kind, tower, tower.config)
    with torch.no_grad():
        forward = allocated(compute, scratch=False)
    tower.requires_grad_(True)
    for weight in tower.parameters():
        weight.grad = torch.zeros_like(weight)
    if checkpointing != "none":
        how = {"context_fn": contexts} if checkpointing == "selective" else {}
        tower.train().gradient_checkpointing_enable({"use_reentrant": False, **how})
    return forward, allocated(lambda: compute().sum().backward(), scratch=False)


def of_depth(kind, dtype, checkpointing):
    """Peaks of the whole tower, from the line through two shallow ones."""
    first = 2 if kind == "internvl" else SHALLOW  # its first block alone computes while nothing else is alive
    shallow, deeper = (peaks(kind, depth, dtype, checkpointing) for depth in (first, DEEPER))
    steps = (TOWERS[kind][1] - first) / (DEEPER - first)
    return [a + (b - a) * steps for a, b in zip(shallow, deeper, strict=True)]


CASES = [
    *((kind, *how) for kind in TOWERS for how in ((torch.float32, "none"), (torch.bfloat16, "full"))),
    *(("qwen2_5_vl", dtype, "selective") for dtype in (torch.float32, torch.bfloat16)),
    ("qwen2_5_vl", torch.bfloat16, "none"),
]


@pytest.mark.slow("a minute of towers at full width")
@pytest.mark.parametrize(("kind", "dtype", "checkpointing"), CASES, ids=lambda one: str(one).removeprefix("torch."))
def test_passes_take_what_the_allocator_hands_out(kind, dtype, checkpointing):
    keys = {**TOWERS[kind][0], "depth": TOWERS[kind][1], "num_hidden_layers": TOWERS[kind][1]}
    config = {"model_type": kind, **OTHERS[kind], "vision_config": keys}
    config["text_config"] = {**config["text_config"], "hidden_size": 3584}
    tower, patches, p = architecture_from(config).tower, 4 * ROWS**2, dtype.itemsize
    assert tower is not None
    forward, backward = of_depth(kind, dtype, checkpointing)
    assert towers.forward_per_patch(tower, p) * patches == pytest.approx(forward, rel=0.1)
    planned = [make(tower, patches, p, checkpointing).bytes for make in (towers.kept, towers.backward)]
    assert sum(planned) == pytest.approx(backward, rel=0.1)


# ---- plans


def test_a_width_that_is_missing_is_named():
    with pytest.raises(DataError, match=r"vision_config.depth must be a whole number"):
        architecture_from({"model_type": "qwen3_vl", **OTHERS["qwen3_vl"], "vision_config": {}})


def planned(*overrides, hardware="T4-16G"):
    loaded = load_config(EXAMPLE, overrides)
    found = plan(loaded.config, find_hardware(hardware), folder=EXAMPLE.parent)
    return {one.name: one.bytes for ledger in found.ledgers for moment in ledger.moments for one in moment.terms}


def test_a_frozen_tower_takes_less():
    trained, frozen = planned(), planned("model.freeze=[vision]")
    count = trained["vision tower: master weights"] // 4
    assert frozen["vision tower"] == 4 * count and trained["tower activations"] > 0
    assert "vision tower: gradient" not in frozen and "tower activations" not in frozen
    copied = planned("model.freeze=[vision]", "algorithm.kl_loss_coef=0.1", "rollout.max_staleness=1")
    assert copied["vision tower, copies"] == 2 * 4 * count


def test_ranks_hold_a_share_of_the_tower_and_engines_all_of_it():
    cluster = ["cluster.backend=ray", "cluster.engines.use=hone", "algorithm.kl_loss_coef=0.1"]
    alone, frozen_alone = planned(), planned("model.freeze=[vision]")
    count = frozen_alone["vision tower"] // 4
    all_trained = alone["master weights"] + alone["vision tower: master weights"]
    learning, frozen = (planned(*cluster, *more, hardware="2xT4-16G") for more in ([], ["model.freeze=[vision]"]))
    assert learning["master weights"] == pytest.approx(all_trained / 2, abs=4)
    assert learning["tower activations"] > 0 and learning["tower's gradients"] > 0
    assert frozen["vision tower"] == 2 * count and "tower activations" not in frozen  # float32, on two ranks
    assert frozen["reference"] == pytest.approx(4 * (alone["master weights"] // 4 + count) / 2, abs=4)
    assert frozen["engine: weights"] == alone["master weights"] + 4 * count


def test_vllm_reserves_room_for_its_tower():
    """Qwen2.5-VL-7B: the features of 8,192 picture tokens, 2 x 3584 bytes each, are there beside the language model's
    step, which takes more than the tower's pass over 4 patches each. A picture with more tokens goes alone."""
    arch = architecture_from(QWEN_7B)
    engine = EngineSettings(arch, 1, 0.6, 8192, 256, 32768, "cluster.engines", picture_pixels=1003520)
    blind = replace(engine, architecture=replace(arch, tower=None))
    plans = [EnginePlan(one, 80 << 30) for one in (blind, engine, replace(engine, picture_pixels=28 * 28 * 16384))]
    text, sees, large = (one.workspace_bytes for one in plans)
    assert [one.seen_tokens for one in plans] == [0, 8192, 16384]
    features, each = 2 * 3584, towers.forward_per_patch(arch.tower, 2) + 6 * 1176
    assert sees == text + 8192 * features
    assert large == 16384 * (features + 4 * each) > 16384 * features + text


def test_an_engine_that_cannot_see_is_refused():
    def problems(*words):
        loaded = load_config(EXAMPLE, ["cluster.backend=ray", "cluster.engines.use=vllm", *words])
        return plan(loaded.config, find_hardware("2xT4-16G"), folder=EXAMPLE.parent).verdict.problems

    other = problems(f"model.init={json.dumps({'model_type': 'internvl', **OTHERS['internvl']})}")
    assert any("internvl has a vision tower" in problem and "use=hone" in problem for problem in other)
    assert not any("has a vision tower" in problem for problem in problems())
    divided = problems("cluster.trainer.tensor_parallel=2")
    assert any("Set cluster.trainer.tensor_parallel=1" in problem for problem in divided)
