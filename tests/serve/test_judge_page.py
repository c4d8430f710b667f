"""docs/rewards-judge.md and serve-policy.md: settings are accepted or refused as they say, code and requests work."""

import json
import re
import shlex
from pathlib import Path
from shutil import copytree

import pytest
import yaml

from hone.cli.main import main
from hone.config.run import RewardSection
from hone.data.chat import Tokenizer, character_tokenizer
from hone.reward.args import settings_of
from hone.reward.judge.scorer import JudgeReward
from hone.reward.judge.settings import JudgeSettings
from hone.reward.judge.user import check
from hone.reward.resolve import Unusable
from hone.serve.openai import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rewards-judge.md").read_text("utf-8")
OF_POLICIES = (ROOT / "docs/serve-policy.md").read_text("utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_the_first_settings_are_accepted_and_their_lengths_come_out(tmp_path):
    section = RewardSection.model_validate(yaml.safe_load(blocks("yaml")[0])["reward"])
    (component,) = section.components
    folder = tmp_path / "models/deepseek-grm"
    folder.mkdir(parents=True)
    Tokenizer(character_tokenizer("ab")).hf.save_pretrained(folder)
    args = component.args | {"template_tokens": 450}  # a tokenizer of two characters counts no words
    assert JudgeReward.from_args(args, folder=tmp_path, timeout_s=1).settings.votes == 3


def test_the_recipe_that_overflows_is_refused_with_the_sum_on_the_page(tmp_path):
    recipe = yaml.safe_load(blocks("yaml")[1])
    with pytest.raises(Unusable) as refused:
        JudgeReward.from_args(recipe, folder=tmp_path, timeout_s=1)
    (said,) = re.findall(r"^    (max_question_tokens 1024 .*): \.\.\.$", PAGE, re.MULTILINE)
    assert said in str(refused.value)


def test_functions_of_the_users_fit(tmp_path):
    settings = settings_of(JudgeSettings, yaml.safe_load(blocks("yaml")[2]))
    config = settings.data_processor_config
    assert config is not None
    (tmp_path / config.path).write_text(blocks("python")[0])
    for role, name in (("preprocess", config.preprocess_fn_name), ("postprocess", config.postprocess_fn_name)):
        check({"path": str(tmp_path / config.path), "name": name, "role": role})


def test_requests_have_the_form_that_the_server_takes():
    commands = [
        shlex.split(line) for block in blocks("bash", OF_POLICIES) for line in block.replace("\\\n", "").splitlines()
    ]
    bodies = {words[2].rpartition("/v1/")[2]: json.loads(words[-1]) for words in commands if "-d" in words}
    assert CompletionRequest.model_validate(bodies["completions"]).n == 2
    assert ChatRequest.model_validate(bodies["chat/completions"]).temperature == 0


def test_the_command_that_tunes_it_writes_a_file_that_fits(tmp_path, monkeypatch, capsys):
    (line,) = re.findall(r"^hone (plan .*)$", PAGE, re.MULTILINE)
    for name in ("judge", "gsm8k"):
        copytree(ROOT / "examples" / name, tmp_path / "examples" / name)
    monkeypatch.chdir(tmp_path)
    assert main(words := shlex.split(line)) == 0
    assert main(["plan", words[-1], "--hardware", "A100-80G"]) == 0
    assert "throughput (time to score all samples of a step)" in capsys.readouterr().out
