"""What OpenRLHF's client sends as a query: prompt and response, decoded with their special tokens, cut apart again."""

import asyncio
import importlib.util
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from served import serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.serve.foreign import OpenRlhfRequest, response_of, without_end

FEW_SHOT = "What is 2+2? #### 4\nWhat is 1+3, do you think?"
CHAT = f"<|im_start|>user\n{FEW_SHOT}<|im_end|>\n<|im_start|>assistant\n"
DEEPSEEK = f"<｜User｜>{FEW_SHOT}<｜Assistant｜>"
LLAMA = f"<|start_header_id|>user<|end_header_id|>\n\n{FEW_SHOT}<|eot_id|>"


@pytest.mark.parametrize(
    ("query", "prompt", "response"),
    [
        (CHAT + "4<|im_end|>", CHAT, "4"),
        (CHAT + "4", CHAT, "4"),
        (CHAT + "4<|im_end|><|im_end|>\n", CHAT, "4"),
        (CHAT + " 4 ", CHAT, " 4 "),
        (FEW_SHOT + "4</s>", FEW_SHOT, "4"),
        (FEW_SHOT + "<eos>", FEW_SHOT, ""),
        (f"<s> {FEW_SHOT} 4</s>", FEW_SHOT, " 4"),
        (f"<s> [INST] {FEW_SHOT} [/INST] 4</s>", f"<s>[INST] {FEW_SHOT} [/INST]", " 4"),
        (f"<|begin_of_text|><|begin_of_text|>{LLAMA}4<|eot_id|>", f"<|begin_of_text|>{LLAMA}", "4"),
        (f"<｜begin▁of▁sentence｜>{DEEPSEEK}4<｜end▁of▁sentence｜>", DEEPSEEK, "4"),
        (FEW_SHOT.replace(", ", " , ") + "4", FEW_SHOT, "4"),
        # truncated from the left
        (CHAT[30:] + "4<|im_end|>", CHAT, "4"),
        (CHAT[30:] + "I do not know<|im_end|>", CHAT, "I do not know"),
        ("\ufffd" + CHAT[40:] + "4<|im_end|>", CHAT, "4"),
        ("<s>" + CHAT[40:] + "4<|im_end|>", CHAT, "4"),
        # not sure, or wrong
        ("I do not know", FEW_SHOT, None),
        ("4", "The sum is 4", None),
        (CHAT[-11:] + "4", CHAT, None),
        (FEW_SHOT.replace("2+2", "2+5") + "4", FEW_SHOT, None),
        ("and again and again and again and again", "Say it again: and again and again and again", None),
        # without a prompt the query is the response
        ("4<|im_end|>", "", "4"),
        ("4", "\n", "4"),
    ],
)  # fmt: skip
def test_a_query_is_cut_behind_its_prompt_or_not_at_all(query, prompt, response):
    assert response_of(query, prompt) == response


def test_ends_and_beginnings_are_found_in_time_in_whatever_there_is():
    for hostile in (
        "<|a|>" * 50_000 + "x",
        "<|a|>" * 50_000,
        "<" * 250_000,
        "<|" * 120_000,
        " " * 250_000,
        "</s>\n" * 50_000,
    ):
        started = time.process_time()
        without_end(hostile)
        response_of(hostile, "a" + hostile)
        response_of("a" * 200_000, "a" * 199_999 + "b")
        assert time.process_time() - started < 2.0  # quadratic ones take minutes


def test_a_query_that_cannot_be_cut_is_a_fault_of_its_own():
    body = OpenRlhfRequest(query=["Q: 4</s>", "something else"], prompts=["Q: ", "Q: "], labels=["4", "4"])
    item, error = body.items()
    assert (item.solution_str, item.id, error.id) == ("4", "item-0", "item-1")
    assert error.error.fault == "data" and "does not begin with its prompt" in error.error.detail


def words(special: str, *, bos: str, eos: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, and which decodes as Llama's first do: no white space in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([bos, eos, *special.split(), *alphabet]))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": special.split()})
    return tokenizer


@pytest.mark.peers
def test_openrlhf_s_own_client_gets_1_for_the_right_answer_and_0_for_another(tmp_path, monkeypatch):
    found = importlib.util.find_spec("openrlhf")
    # Its package imports DeepSpeed; the client alone needs no more than a logger.
    monkeypatch.setitem(sys.modules, "openrlhf.utils.logging_utils", SimpleNamespace(init_logger=logging.getLogger))
    monkeypatch.setitem(sys.modules, "openrlhf.utils", SimpleNamespace())
    path = Path(found.submodule_search_locations[0]) / "utils" / "agent.py"
    spec = importlib.util.spec_from_file_location("openrlhf_agent", path)
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    tokenizer = words("<|im_start|> <|im_end|>", bos="<s>", eos="</s>")

    async def reward(url, prompt, response, max_length):
        ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

        async def generate(*_, **__):
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=None)])

        sampling = SimpleNamespace(max_tokens=40, logprobs=None)
        engine = SimpleNamespace(generate=generate)
        executor = agent.SingleTurnAgentExecutor([f"{url}/get_reward"])
        return (await executor.execute(prompt, "4", sampling, max_length, tokenizer, engine))["reward"]

    with serving(tmp_path, rewards="reward: {components: [{use: gsm8k}]}") as running:
        for prompt in (FEW_SHOT, CHAT, f"<s>{CHAT}"):
            for max_length in (1000, 100):  # whole, and truncated from the left
                right, wrong = (
                    asyncio.run(reward(running.url, prompt, text, max_length)) for text in ("#### 4", "I do not know")
                )
                assert (right, wrong) == ([1.0], [0.0])
