"""`data.template_args`: defaults of the chat template's variables, wherever the template is rendered."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from hone.config.run import DataSection, ModelSection
from hone.data.chat import load_tokenizer, thinks
from hone.data.prompts import load_prompts
from hone.errors import DataError
from hone.run.check_rows import check_template, preview
from hone.run.report import CheckReport

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
OFF: dict[str, Any] = {"enable_thinking": False}


@pytest.fixture
def model(model_directory) -> ModelSection:
    hf = AutoTokenizer.from_pretrained(model_directory)
    hf.chat_template = TEMPLATE
    hf.save_pretrained(model_directory)
    return ModelSection(path=str(model_directory))


def test_prompts_are_rendered_with_them(model, tmp_path, write_rows):
    source = write_rows(json.dumps({"prompt": "how many"}))
    data = DataSection(train=source, chat=True, template_args=OFF)
    (prompt,) = load_prompts(data, load_tokenizer(model, tmp_path, data.template_args), tmp_path, seed=0).rows()
    assert prompt.text == "<|user|>how many<|assistant|><think></think>"
    (plain,) = load_prompts(data, load_tokenizer(model, tmp_path), tmp_path, seed=0).rows()
    assert plain.text == "<|user|>how many<|assistant|>"


def test_an_export_has_them_as_defaults_that_a_request_may_replace(model, tmp_path):
    load_tokenizer(model, tmp_path, OFF).hf.save_pretrained(tmp_path / "out")
    served = load_tokenizer(ModelSection(path=str(tmp_path / "out")), tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert served.render(messages).endswith("<|assistant|><think></think>")
    assert served.render(messages, {"enable_thinking": True}).endswith("<|assistant|>")
    again = load_tokenizer(ModelSection(path=str(tmp_path / "out")), tmp_path, OFF)
    assert again.hf.chat_template == served.hf.chat_template


def test_arguments_need_a_template(tmp_path):
    with pytest.raises(DataError, match="no chat template that could take them"):
        load_tokenizer(ModelSection(characters="ab"), tmp_path, OFF)


def test_a_request_cannot_bring_a_template_of_its_own(model, tmp_path):
    with pytest.raises(DataError, match="no variable chat_template"):
        load_tokenizer(model, tmp_path).render([{"role": "user", "content": "a"}], {"chat_template": "b"})


@pytest.mark.parametrize(
    ("template_args", "room", "said"),
    [
        ({}, 512, "rollout.max_response_tokens: 512, but the chat template lets the model think"),
        ({}, 8192, ""),
        (OFF, 512, ""),
        ({"enable_thinkin": False, **OFF}, 512, "does not use enable_thinkin"),
    ],
)
def test_check_warns_of_reasoning_that_would_be_cut(model, tmp_path, write_rows, template_args, room, said):
    data = DataSection(train=write_rows(json.dumps({"prompt": "how many"})), chat=True, template_args=template_args)
    tokenizer = load_tokenizer(model, tmp_path, template_args)
    (prompt,) = load_prompts(data, tokenizer, tmp_path, seed=0).rows()
    findings = CheckReport()
    check_template(data, room, prompt, tokenizer, findings)
    assert [said in warning for warning in findings.warnings] == [True] * bool(said)
    assert "<|user|>how many<|assistant|>" in preview(prompt, tokenizer)


def test_whether_a_prompt_lets_the_model_think():
    assert thinks(TEMPLATE, "<|assistant|>")
    assert not thinks(TEMPLATE, "<|assistant|><think>\n\n</think>\n\n")
    assert thinks("{{ '<think>' }} {{ '</think>' }}", "<|assistant|><think>\n")
    assert not thinks("{{ messages }}", "<|assistant|>")
