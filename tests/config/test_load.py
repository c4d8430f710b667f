import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from random_search import examples

from hone.config import schema
from hone.config.load import load_config
from hone.errors import ConfigError


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def fails(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


BASE = """\
model:
  init: {model_type: qwen3, max_position_embeddings: 4096}
  characters: "0123456789+="
data: {train: train.jsonl, answer_column: answer}
reward: {components: [{use: exact}]}
"""


def test_layers_in_order_last_wins_and_every_layer_is_remembered(folder):
    write(folder, low="rollout: {group_size: 2}\ntrain: {prompts_per_step: 4}\n", high="rollout:\n  group_size: 4\n")
    write(folder, run=f"extends: [low.yaml, high.yaml]\n{BASE}rollout:\n  group_size: 8\n")
    loaded = load_config(folder / "run.yaml", ["rollout.group_size=16"])
    assert loaded.config.rollout.group_size == 16
    assert loaded.config.train.prompts_per_step == 4
    assert [setting.value for setting in loaded.origins["rollout.group_size"]] == [2, 4, 8, 16]
    wheres = [str(setting.where) for setting in loaded.origins["rollout.group_size"]]
    assert wheres[2:] == [f"{folder}/run.yaml:8", "command line"]
    assert [Path(where).name for where in wheres[:2]] == ["low.yaml:1", "high.yaml:2"]
    assert loaded.where("train.passes_per_batch") is None


def test_extends_is_recursive_and_relative_to_the_file_that_says_it(folder):
    (folder / "sub").mkdir()
    write(folder, run=f"extends: sub/a.yaml\n{BASE}", top="seed: 3\nrun: {steps: 1}\n")
    write(folder / "sub", a="extends: [../top.yaml, algorithm/dapo]\nrun: {steps: 2}\n")
    config = load_config(folder / "run.yaml").config
    assert (config.seed, config.run.steps, config.algorithm.clip_high) == (3, 2, 0.28)


def test_paths_in_an_extended_file_start_at_its_own_folder(folder):
    """The run file is run/own/run.yaml, which extends base/base.yaml, beside which everything lies."""
    base, own = folder / "base", folder / "run" / "own"
    own.mkdir(parents=True)
    (base / "models" / "rm").mkdir(parents=True)
    for name in ("train.jsonl", "eval.jsonl"):
        (base / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (base / "mine.py").write_text("def f(group): ...\nclass World: ...\n")
    (base / "exact").write_text("a file called as a built-in reward is")
    (base / "serve.yaml").write_text("reward: {components: [{use: exact}]}\n")
    extended = BASE.replace("train: train.jsonl", "train: train.jsonl, eval: [{path: ./eval.jsonl}, eval.jsonl]")
    model = "{use: reward_model, args: {path: models/rm}}"
    components = f"[{{use: exact}}, {{use: mine.py:f, args: {{path: train.jsonl}}}}, {model}]"
    write(
        base,
        base=extended.replace("[{use: exact}]", components)
        + "rollout: {environment: {use: mine.py:World}}\ncritic: {path: Qwen/Qwen3-0.6B}\nalgorithm: {credit: gae}\n"
        "services: {a: {reward: serve.yaml}, b: {command: [python, mine.py, '--port={port}']}}\n",
    )
    write(own, run="extends: ../../base/base.yaml\n")
    loaded = load_config(own / "run.yaml", ["sft.data=train.jsonl"])
    config = loaded.config
    paths = [source.path for source in (*config.data.train, *config.data.eval)]
    assert paths == ["../../base/train.jsonl", "../../base/eval.jsonl", "../../base/eval.jsonl"]
    assert str(loaded.where("data.train")).endswith("base/base.yaml:4")
    assert [c.use for c in config.reward.components] == ["exact", "../../base/mine.py:f", "reward_model"]
    assert [c.args for c in config.reward.components][1:] == [{"path": "train.jsonl"}, {"path": "../../base/models/rm"}]
    assert config.rollout.environment.use == "../../base/mine.py:World"
    assert config.critic.path == "Qwen/Qwen3-0.6B"
    assert config.services["a"].reward == "../../base/serve.yaml"
    assert config.services["b"].command == ("python", "../../base/mine.py", "--port={port}")
    assert config.sft.data[0].path == "train.jsonl", "the command line is the run file's"


def test_a_path_in_an_extended_file_is_reported_with_that_files_line(folder):
    base, own = folder / "base", folder / "own"
    base.mkdir()
    own.mkdir()
    (own / "train.jsonl").write_text("{}\n")  # where it would have been found before
    write(base, base=f"# first line\n{BASE}")
    write(own, run="extends: ../base/base.yaml\n")
    (problem,) = fails(own / "run.yaml")
    place, _, message = problem.partition("  data.train: ")
    assert place.endswith("base/base.yaml:5")
    assert message.startswith("'../base/train.jsonl' does not exist, looked for at ")


def test_a_cycle_is_named(folder):
    write(folder, run=f"extends: b.yaml\n{BASE}", b="extends: run.yaml\n")
    assert fails(folder / "run.yaml")[0].endswith("extends: extends itself: run.yaml -> b.yaml -> run.yaml")


def test_a_file_that_two_layers_extend_is_no_cycle(folder):
    write(folder, run=f"extends: [a.yaml, b.yaml]\n{BASE}", a="extends: c.yaml\n", b="extends: c.yaml\n", c="seed: 1\n")
    assert load_config(folder / "run.yaml").config.seed == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("algorithm/dapoo", "no preset and no file is called 'algorithm/dapoo'. Did you mean algorithm/dapo?"),
        ("bse.yaml", "bse.yaml does not exist. Did you mean"),
        ("3", "must be the name of a preset or a file (got 3)"),
    ],
)
def test_what_cannot_be_extended_is_named_with_its_line(folder, name, said):
    write(folder, run=f"{BASE}extends:\n  - {name}\n", base="seed: 1\n")
    (problem,) = fails(folder / "run.yaml")
    assert f"run.yaml:{7}  extends: " in problem
    assert said in problem


def test_mappings_merge_and_lists_replace(folder):
    write(folder, low="rollout: {stop: [a, b], top_k: 0}\nmodel: {init: {hidden_size: 8}}\n")
    write(folder, run=f"extends: low.yaml\n{BASE}rollout: {{stop: [c]}}\n")
    config = load_config(folder / "run.yaml").config
    assert config.rollout.stop == ("c",)
    assert config.model.init == {"hidden_size": 8, "model_type": "qwen3", "max_position_embeddings": 4096}


def test_a_section_with_every_key_commented_out_sets_nothing(load):
    assert load(train="\n  # prompts_per_step: 3").config.train.prompts_per_step == 32


def test_numbers_on_the_command_line_and_in_the_file(load):
    lr = {"train__optimizer": "{lr: 1e-6}"}
    assert load(**lr).config.train.optimizer.lr == 1e-6
    assert load("train.optimizer.lr=1E-5", "rollout.temperature=.5").config.train.optimizer.lr == 1e-5
    assert load("rollout.temperature=.5").config.rollout.temperature == 0.5


def test_overrides_reach_list_entries_and_new_mappings(load):
    loaded = load("reward.components.0.weight=2", "reward.components.0.args.a.b=[1, 2]", "model.init.hidden_size=64")
    component = loaded.config.reward.components[0]
    assert (component.weight, component.args) == (2.0, {"a": {"b": [1, 2]}})
    assert loaded.config.model.init["hidden_size"] == 64  # type: ignore[index]
    assert str(loaded.where("reward.components.0.weight")) == "command line"
    assert str(loaded.where("reward.components.0.use")).endswith("run.yaml:8")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.characters=0123", "0123"),
        ('model.characters="01"', "01"),
        ("model.characters={prompt}: x", "{prompt}: x"),
        ("model.characters=a=b", "a=b"),
        ("model.characters='it''s'", "it's"),
    ],
)
def test_text_needs_no_second_quotes_on_the_command_line(load, override, value):
    assert load(override).config.model.characters == value


def test_null_on_the_command_line_unsets(load):
    config = load("data.answer_column=null", "stages=[sft]", "sft.response_column=answer").config
    assert config.data.answer_column is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("foo", 'command line  "foo" is not `section.key=value`'),
        ("=3", "is not `section.key=value`"),
        ("a..b=3", "is not `section.key=value`"),
        ("seed=[1", "command line  seed: is not valid YAML"),
        ("reward.components[0].weight=1", "a place in a list is written with a point: reward.components.0.weight"),
        ("reward.components.5.weight=1", "the list has entries 0 to 0, and no entry '5'"),
        ("extends=algorithm/grpo", "extends: is set in the run file, not on the command line"),
        ("rollout.groupsize=3", "rollout.groupsize: unknown key. Did you mean rollout.group_size?"),
        ("rollout.group_size=0", "rollout.group_size: must be at least 1 (got 0). Nearest: 1"),
        ("data.train.0.weight=-1", "data.train.0.weight: must be at least 0 (got -1). Nearest: 0"),
        ("data.train=[{weight: 1}]", "data.train.0.path: is required."),
        ("data.train.0.promt_column=x", "unknown key. Did you mean data.train.0.prompt_column?"),
        ("data.train.1.path=x", "the list has entries 0 to 0, and no entry '1'"),
    ],
)
def test_a_wrong_override_is_named(folder, override, said):
    write(folder, run=BASE)
    assert any(said in problem for problem in fails(folder / "run.yaml", override))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rollout__group_size", "0", "must be at least 1 (got 0). Nearest: 1"),
        ("rollout__group_size", "8.5", "must be a whole number, at least 1 (got 8.5). Nearest: 8"),
        ("rollout__group_size", '"8"', 'must be a whole number, at least 1 (got "8"). Write it without quotes'),
        ("rollout__group_size", "true", "must be a whole number, at least 1 (got true)"),
        ("rollout__temperature", "0", "must be above 0 (got 0)"),
        ("rollout__temperature", ".inf", "must be a number, above 0 (got inf)"),
        ("rollout__top_p", "1.5", "must be above 0 and at most 1 (got 1.5). Nearest: 1"),
        ("rollout__stop", "x", 'must be a list of texts (got "x"). Write ["x"]'),
        ("rollout__stop", "null", "must be a list of texts (got null)"),
        ("run__threads", "1025", "must be at least 0 and at most 1024 (got 1025). Nearest: 1024"),
        ("reward__workers", "100000000", "must be at least 1 and at most 4096 (got 100000000). Nearest: 4096"),
        ("data__train", "3", "must be text, or a list of texts and mappings (got 3)"),
        ("data__train", "[a/b, 3]", 'must be text, or a list of texts and mappings (got ["a/b", 3])'),
        ("data__chat", "yes", 'must be true or false (got "yes"). Write true'),
        ("model__characters", "12", "must be text or null (got 12). Put it in quotes"),
        ("run__precision", "float23", 'must be one of auto, float32, bfloat16 (got "float23"). Did you mean float32?'),
        ("algorithm__reward_clip", "[1]", "must be a list of 2 numbers or null (got [1])"),
        ("train", "7", "must be a section: keys and values, indented under it (got 7)"),
        ("stages", "[]", "must be a list, each one of sft, reward_model, rl, not empty (got [])"),
        ("reward__components", "3", "must be a list of sections, each starting with `- ` (got 3)"),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_rule_what_was_got_and_a_cure(problems_of, key, value, said):
    assert problems_of(**{key: value})[0] == f"{key.replace('__', '.')}: {said}"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout__max_stalenes", "unknown key. Did you mean rollout.max_staleness?"),
        ("train__group_size", "unknown key here. Did you mean rollout.group_size?"),
        ("group_size", "unknown key here. Did you mean rollout.group_size?"),
        ("rolout", "unknown key. Did you mean rollout?"),
        ("train__lr", "unknown key here. Did you mean train.optimizer.lr or critic.optimizer.lr or sft.optimizer.lr?"),
        ("rollout__n_samples_per_prompt", "unknown key. OpenRLHF's rollout.n_samples_per_prompt is rollout.group_size"),
        ("gate__xyzzy", "unknown key. gate has: enabled, max_logprob_gap"),
    ],
)
def test_an_unknown_key_gets_its_nearest_spelling_or_its_section(problems_of, key, said):
    assert problems_of(**{key: "3"}) == [f"{key.replace('__', '.')}: {said}"]


def test_a_source_may_be_text_or_a_mapping_and_errors_name_its_line(folder):
    entries = "[train.jsonl,\n  {path: train.jsonl, prompt_column: answer,\n  weight: x}]"
    write(folder, run=BASE.replace("train: train.jsonl", f"train: {entries}"))
    (problem,) = fails(folder / "run.yaml")
    assert problem.endswith('run.yaml:6  data.train.1.weight: must be a number or null, at least 0 (got "x")')
    write(folder, run=BASE.replace("train: train.jsonl", f"train: {entries}").replace("weight: x", "weight: 2"))
    weights = ["data.train.0.weight=1"]
    (problem,) = fails(folder / "run.yaml", *weights, "data.train.1.prompt_column=question")
    assert "data.train.1.prompt_column: train.jsonl has no column 'question'" in problem
    config = load_config(folder / "run.yaml", weights).config
    assert [(one.path, one.prompt_column, one.weight) for one in config.data.train] == [
        ("train.jsonl", None, 1), ("train.jsonl", "answer", 2)
    ]  # fmt: skip


def test_all_problems_of_all_layers_come_together_in_order(folder):
    write(folder, low="rollout:\n  group_size: 0\n  max_stalenes: 1\n")
    write(folder, run=f"extends: low.yaml\n{BASE}rollout:\n  group_size: 8\n  top_p: 0.9\nseed: -1\n")
    problems = fails(folder / "run.yaml", "eval.every=5", "data.train=nope.jsonl")
    found = [problem.split("  ", 1)[1].strip().partition(":")[0] for problem in problems]
    assert found[:2] == ["rollout.group_size", "rollout.max_stalenes"]
    assert found[2:] == ["rollout.top_p", "seed", "eval.every", "data.train"]
    assert [problem.split("  ")[0].rpartition("/")[2] for problem in problems[2:]] == [
        "run.yaml:9", "run.yaml:10", "command line", "command line",
    ]  # fmt: skip


def test_nothing_of_pydantic_shows(problems_of):
    said = "\n".join(problems_of(rollout__group_size="x", data__train="3", reward__components="[{weight: a}, 3]"))
    for word in ("Input should", "pydantic", "validation", "type=", "errors.pydantic"):
        assert word not in said
    assert "reward.components.0.use: is required." in said


def test_a_rule_is_silent_about_a_key_that_is_wrong_by_itself(problems_of):
    said = problems_of(rollout__group_size="0", train__samples_per_optimizer_step="7")
    assert said == ["rollout.group_size: must be at least 1 (got 0). Nearest: 1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "run.yaml:1  is empty"),
        (b"# only this\n", "run.yaml:1  is empty"),
        (b"- a\n- b\n", "run.yaml:1  must be sections of `key: value` lines"),
        (b"just text\n", "run.yaml:1  must be sections"),
        (b"a: \xff\xfe\n", "run.yaml:1  is not UTF-8 text"),
        (b"model:\n\tpath: x\n", "run.yaml:2  is indented with a tab"),
        (b"seed: 1\nseed: 2\n", "run.yaml:2  seed is written twice"),
        (b"a" * (5 << 20), "bytes; a run file has at most"),
    ],
)
def test_a_broken_file_is_described(tmp_path, content, said):
    (tmp_path / "run.yaml").write_bytes(content)
    assert said in fails(tmp_path / "run.yaml")[0]


def test_a_byte_order_mark_is_no_problem(folder):
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load_config(folder / "run.yaml").name == folder.name


def test_missing_file_directory_and_unreadable_name(tmp_path):
    write(tmp_path, recipe=BASE)
    assert f"Did you mean {tmp_path}/recipe.yaml?" in fails(tmp_path / "recipes.yaml")[0]
    assert "is a directory" in fails(tmp_path)[0]
    assert "cannot be read" in fails(Path("x" * 5000))[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("observe__api_key", "abc"),
        ("observe__wandb", "sk-abcdefghijklmnopqrstuv"),
        ("model__path", "https://me:hunter2@host/model"),
        ("cluster__env", "{NCCL_DEBUG: INFO, MY_API_KEY: abc}"),
        ("services", "{judge: {policy: a/b, env: {PROXY: 'http://me:hunter2@host'}}}"),
        ("reward__components", "[{use: exact, args: {password: abc}}]"),
        ("reward__components", "[{use: exact, args: {headers: ['Bearer abcdefghijklmnopqrst']}}]"),
        ("reward__components", "[{use: exact, args: {services: [{openai_key: abc}, 3]}}]"),
    ],
)
def test_secrets_are_refused_and_never_repeated(problems_of, key, value):
    said = problems_of(**{key: value})
    assert any("looks like a secret. Secrets come from the environment only" in problem for problem in said)
    for secret in ("abc", "sk-abcdef", "hunter2"):
        assert secret not in "\n".join(said)


def test_a_secret_is_refused_on_the_command_line_too(problems_of):
    assert "environment only" in problems_of("reward.components.0.args.api_key=x")[0]


def test_the_resolved_file_reads_back_to_the_same_values(load, folder):
    loaded = load(
        "run.steps=7", 'data.template=a: {prompt}\\n"\u2028\x85"#é', "rollout.stop=['\\n', '# ']",
        "reward.components.0.args={x: [1e-9, null, {y: yes}, -.inf, '\"-Infinity']}", "train.optimizer.lr=1e-12",
    )  # fmt: skip
    resolved = folder / "resolved.yaml"
    resolved.write_text(loaded.as_yaml(), "utf-8")
    assert load_config(resolved).config == loaded.config
    assert "steps: 7 " in loaded.as_yaml()
    assert loaded.as_yaml().count("# command line") == 5


def test_names_and_paths(load, folder):
    loaded = load()
    assert loaded.name == folder.name
    assert loaded.run_dir == Path("runs") / folder.name
    assert loaded.path("train.jsonl") == folder / "train.jsonl"
    assert loaded.path("/abs") == Path("/abs")
    (folder / "other.yaml").write_text((folder / "run.yaml").read_text())
    assert load_config(folder / "other.yaml").name == "other"


def test_a_run_file_is_read_from_where_it_is_not_from_here(load, folder, monkeypatch):
    load()
    monkeypatch.chdir("/")
    assert load_config(os.path.relpath(folder / "run.yaml")).config.data.train[0].path == "train.jsonl"


KEYS = [*sorted({part for path in schema.all_keys() for part in (path, *path.split("."))}), "extends", "x"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1e-6", ".5", "runs/{name}", "algorithm/dapo", "file.py:f", "a.b:c", "os.path:join", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), key=st.sampled_from(KEYS), value=VALUES)
def test_any_tree_loads_or_is_a_config_error(folder, tree, key, value):
    import json

    section, _, name = key.rpartition(".")
    tree |= {section or name: {name: value}}
    (folder / "run.yaml").write_text(json.dumps(tree), "utf-8")
    try:
        load_config(folder / "run.yaml", [f"{key}={value}"])
    except ConfigError as error:
        assert error.problems
        assert not any("Input should" in problem for problem in error.problems)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=80) | st.text(max_size=80).map(str.encode), cut=st.integers(0, len(BASE)))
def test_garbage_in_a_file_is_a_config_error(folder, garbage, cut):
    (folder / "run.yaml").write_bytes(BASE[:cut].encode() + garbage + BASE[cut:].encode())
    try:
        load_config(folder / "run.yaml")
    except ConfigError as error:
        assert error.problems
