import pytest

from hone.config.layers import PRESETS, preset_names
from hone.config.load import load_config
from hone.config.yaml_tree import read_yaml

NAMES = preset_names()
ROWS = {
    "grpo": ("group_norm", "token", "ppo", 0.2, 0.2, "sample_mean", 0.04, False),
    "dr_grpo": ("group_mean", "token", "ppo", 0.2, 0.2, "fixed_length", 0.0, False),
    "dapo": ("group_norm", "token", "ppo", 0.2, 0.28, "token_mean", 0.0, True),
    "ppo": ("gae", "token", "ppo", 0.2, 0.2, "token_mean", 0.0, False),
    "reinforce_pp": ("reinforce_pp", "token", "ppo", 0.2, 0.2, "token_mean", 0.0, False),
    "remax": ("remax", "token", "ppo", 0.2, 0.2, "fixed_length", 0.0, False),
    "reinforce": ("group_mean", "none", "none", 0.2, 0.2, "token_mean", 0.0, False),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_loads_and_every_value_is_from_it(load, folder, name):
    load()
    is_path = "path:" in (PRESETS / f"{name}.yaml").read_text()
    text = (folder / "run.yaml").read_text()
    if name.startswith("model/"):
        text = text.replace("  init: {model_type: qwen3, max_position_embeddings: 4096}\n", "")
        text = text.replace('  characters: "0123456789+="\n', "  tokenizer: null\n") if is_path else text
    (folder / "run.yaml").write_text(f"extends: {name}\n{text}")
    small = ["data.max_prompt_tokens=64", "rollout.max_response_tokens=64"]
    loaded = load_config(folder / "run.yaml", small)
    node, _ = read_yaml((PRESETS / f"{name}.yaml").read_text(), name)
    assert node is not None
    for path, leaf in node.leaves():
        found = loaded.tree.find(path)
        assert found is not None
        assert found.plain() == leaf.plain()
        assert str(found.where) == f"preset {name}:{leaf.where.line}"


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_opens_with_a_whole_sentence_and_sets_one_area(name):
    lines = (PRESETS / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("name", ROWS)
def test_algorithm_rows_are_the_published_ones(load, folder, name):
    load()
    (folder / "run.yaml").write_text(f"extends: algorithm/{name}\n" + (folder / "run.yaml").read_text())
    row = load_config(folder / "run.yaml").config.algorithm
    choices = (row.credit, row.ratio, row.clip, row.clip_low, row.clip_high, row.aggregate)
    assert (*choices, row.kl_loss_coef, row.drop_uninformative) == ROWS[name]
