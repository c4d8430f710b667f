"""`hone serve policy` with a model that reads pictures: what it samples is what Transformers computes, and what it
refuses."""

import asyncio
import base64
from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import forward, save_picture, save_seeing_model

from hone.assemble.policy_server import PolicySettings, loader
from hone.config.run import ModelSection
from hone.data.chat import load_tokenizer
from hone.data.picture_processors import PictureProcessor
from hone.model.hf import TransformersModel
from hone.model.load import load_model
from hone.serve.openai import ChatRequest, OpenAIProblem
from hone.serve.policy import PolicyService
from hone.types import Prompt

MARK = 42
"""Token id of a picture in the saved model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model/, and two pictures of different sizes."""
    made = tmp_path_factory.mktemp("served")
    save_seeing_model(made / "model")
    for seed, size in enumerate(((40, 40), (30, 90))):
        save_picture(made / f"{seed}.png", seed, *size)
    return made


def asked(folder, *contents, **settings):
    """What a service says to each user message."""

    async def main():
        service = PolicyService(loader(str(folder / "model"), 3, "tiny", PolicySettings(threads=1, **settings)))
        await service.start()
        try:
            return [await service.chat(request(content)) for content in contents]
        finally:
            await service.close()

    return asyncio.run(main())


def request(content):
    messages = [{"role": "user", "content": content}]
    return ChatRequest.model_validate(
        {"messages": messages, "seed": 5, "n": 4, "max_tokens": 4, "logprobs": True, "return_token_ids": True}
    )


def data_url(file):
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def compared(folder, reply, files):
    """Logprobs of what was sampled, and Transformers' with these pictures at the places that have picture tokens; up to
    where a response spells such a token, which Transformers refuses."""
    tokenizer = load_tokenizer(ModelSection(path=str(folder / "model")), folder)
    processor = PictureProcessor.of(tokenizer.processor, most_pixels=1_003_520)
    ids, placed, at = reply.prompt_token_ids, [], 0
    for file in files:
        picture = replace(processor.picture(file), start=ids.index(MARK, at))
        at = picture.start + picture.num_tokens
        assert set(ids[picture.start : at]) == {MARK} and ids[at] != MARK
        placed.append(picture)
    prompt = Prompt("", 0, "", np.array(ids), pictures=tuple(placed))
    model = load_model(folder / "model", dtype=torch.float32, device="cpu")
    assert isinstance(model, TransformersModel)
    for choice in reply.choices:
        known = [*choice.token_ids, MARK].index(MARK)
        found = [token.logprob for token in choice.logprobs.content[:known]]
        yield from zip(found, forward(model, prompt, choice.token_ids[:known]).tolist(), strict=True)


def test_what_is_sampled_is_what_transformers_computes(folder):
    files = [folder / "0.png", folder / "1.png"]
    parts = [image(data_url(files[0])), {"type": "text", "text": "and"}, image(data_url(files[1]))]
    both, swapped, none = asked(folder, parts, parts[::-1], "and")
    for reply, shown in ((both, files), (swapped, files[::-1]), (none, [])):
        pairs = list(compared(folder, reply, shown))
        assert len(pairs) >= 4
        assert all(ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in pairs)
        assert reply.usage.prompt_tokens == len(reply.prompt_token_ids or ())
    assert both.choices[0].logprobs != swapped.choices[0].logprobs


def test_files_are_read_from_one_folder_alone(folder, tmp_path):
    by_path, by_url = asked(folder, [image("0.png")], [image(data_url(folder / "0.png"))], image_root=folder)
    assert by_path.prompt_token_ids == by_url.prompt_token_ids
    assert by_path.choices[0].logprobs == by_url.choices[0].logprobs
    save_picture(tmp_path / "other.png", 1, 30, 30)
    for url, settings, why in (
        (str(tmp_path / "other.png"), {"image_root": folder}, "is outside of"),
        ("0.png", {}, "send a data URL"),
        ("http://example.com/0.png", {"image_root": folder}, "nothing is fetched"),
        ("data:image/png;base64,AAAA", {}, "is not a picture"),
    ):
        with pytest.raises(OpenAIProblem, match=why):
            asked(folder, [image(url)], **settings)


def test_larger_pictures_are_scaled_down_and_too_many_are_too_long(folder):
    (small,) = asked(folder, [image(data_url(folder / "1.png"))], max_image_pixels=784)
    assert (small.prompt_token_ids or []).count(MARK) == 1
    with pytest.raises(OpenAIProblem, match="more than the context of 96"):
        asked(folder, [image(data_url(folder / "1.png"))] * 40)
