import json

import pytest
from transformers import AutoTokenizer

from hone.config.run import ModelSection
from hone.data.chat import Tokenizer, UnknownCharacter, can_resolve, character_tokenizer, load_tokenizer, resolve_model
from hone.errors import DataError

CHARACTERS = "0123456789+-*/= é\n{}<"


def test_characters_are_numbered_after_pad_and_eos(digits):
    assert digits.encode_prompts(["48/2="], rendered=False) == [[6, 10, 15, 4, 16]]
    assert digits.encode_responses(["24"])[0] == [4, 6, 1]
    assert (digits.pad_id, digits.eos_id, digits.eos_ids, digits.vocab_size) == (0, 1, (1,), 17)


def test_every_character_survives_a_round_trip():
    tokenizer = Tokenizer(character_tokenizer(CHARACTERS))
    (ids,) = tokenizer.encode_prompts([CHARACTERS], rendered=False)
    assert len(ids) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == CHARACTERS


def test_a_character_tokenizer_saves_and_loads_as_any_other(tmp_path):
    built = Tokenizer(character_tokenizer(CHARACTERS))
    built.hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelSection(path=str(tmp_path)), tmp_path)
    text = "1 + 1 = 2\n"
    assert loaded.encode_responses([text])[0] == built.encode_responses([text])[0]
    assert loaded.decode(loaded.encode_responses([text])[0]) == text
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == built.encode_responses([text])[0][:-1]
    with pytest.raises(UnknownCharacter):
        loaded.encode_responses(["x"])[0]


def test_an_unknown_character_is_named(digits):
    with pytest.raises(UnknownCharacter, match=r"character 'x' \(U\+0078\) is not in model.characters"):
        digits.encode_prompts(["1+1=", "2x3="], rendered=False)


@pytest.mark.parametrize(("characters", "problem"), [("abca", "given twice: 'a'"), ("", "none given")])
def test_bad_character_lists(characters, problem):
    with pytest.raises(DataError, match=problem):
        character_tokenizer(characters)


def test_a_plain_prompt_gets_the_tokenizers_start_but_not_its_end(model_directory):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    (ids,) = tokenizer.encode_prompts(["four apples"], rendered=False)
    assert ids[0] == 0
    assert ids[-1] != tokenizer.eos_id
    assert tokenizer.decode(ids) == "four apples"


def test_a_response_gets_an_end_and_no_start(model_directory):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    ids = tokenizer.encode_responses(["four"])[0]
    assert ids[0] != 0
    assert ids[-1] == tokenizer.eos_id


def test_a_rendered_prompt_is_taken_as_it_is(model_directory):
    tokenizer = load_tokenizer(ModelSection(path="model"), model_directory.parent)
    text = tokenizer.render([{"role": "user", "content": "how many"}])
    assert text == "<|user|>how many<eos><|assistant|>"
    (ids,) = tokenizer.encode_prompts([text], rendered=True)
    assert (ids[0], ids[-2:]) == (2, [1, 3])


@pytest.mark.parametrize(("given", "ids"), [([1, 5, 6], (1, 5, 6)), (5, (1, 5)), (None, (1,))])
def test_ends_of_generation_config_count_too(model_directory, given, ids):
    (model_directory / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert load_tokenizer(ModelSection(path="model"), model_directory.parent).eos_ids == ids


def test_without_any_end_it_says_what_to_set(model_directory):
    path = model_directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"has no EOS token.*Set `eos_token`"):
        load_tokenizer(ModelSection(path="model"), model_directory.parent)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(DataError, match=r"model ./gone: no directory at"):
        load_tokenizer(ModelSection(path="./gone"), tmp_path)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"tokenizer empty: cannot be loaded"):
        load_tokenizer(ModelSection(path="empty"), tmp_path)


def test_init_without_a_tokenizer_says_what_to_set(tmp_path):
    with pytest.raises(DataError, match=r"Set model\.characters or model\.tokenizer"):
        load_tokenizer(ModelSection(init={"model_type": "qwen3"}), tmp_path)


def test_hub_names_stay_names(tmp_path):
    assert resolve_model("Qwen/Qwen3-0.6B", tmp_path) == "Qwen/Qwen3-0.6B"


def test_chat_without_a_template_says_what_to_do(digits):
    with pytest.raises(DataError, match="has no chat template"):
        digits.render([{"role": "user", "content": "1"}])


def test_a_hub_without_a_network_is_known_at_once(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert not can_resolve("https://nowhere.invalid")
    assert can_resolve("http://localhost:8000")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert can_resolve("https://nowhere.invalid")


def test_a_hub_name_that_cannot_be_had_is_named(tmp_path):
    with pytest.raises(DataError, match="tokenizer nobody/nothing: cannot be loaded"):
        load_tokenizer(ModelSection(path="nobody/nothing"), tmp_path)


def test_weights_without_a_tokenizer_are_not_given_an_empty_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(DataError, match=r"has no tokens but 1 special ones.*model\.tokenizer"):
        load_tokenizer(ModelSection(path=str(tmp_path)), tmp_path)
