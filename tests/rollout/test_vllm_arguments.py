"""What vLLM is started with, without vLLM."""

import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pictures import picture, prompt_with, seeing_model

from hone.assemble.vllm import picture_pixels
from hone.config.engine import EngineSection
from hone.config.run import DataSection, LoraSection
from hone.errors import EngineError
from hone.rollout.engine import Sampling
from hone.rollout.vllm import VllmEngine
from hone.rollout.vllm_args import VllmPlace, check_sampling, engine_arguments
from hone.rollout.vllm_requests import VllmPictures, vllm_prompt
from hone.rollout.vllm_weights import VllmAdapter


@pytest.fixture
def place(tmp_path):
    """2 layers with 2 heads of 16 for keys and values: 2 x 2 x 2 x 16 numbers a token."""
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return VllmPlace(tmp_path, "bfloat16", longest_tokens=100, max_concurrent=10, prefill_tokens=64)


def arguments(place, *, on_gpu=True, **args):
    return engine_arguments(EngineSection.model_validate(args), place, on_gpu=on_gpu)


def test_an_adapter_that_is_published_alone_has_room_in_vllm(place):
    assert not {"enable_lora", "max_lora_rank"} & arguments(place).keys()
    beside = replace(place, adapter=LoraSection(rank=20, publish="adapter"))
    assert {name: arguments(beside)[name] for name in ("enable_lora", "max_loras", "max_lora_rank")} == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 32,
    }


def test_an_adapter_that_vllm_does_not_take_leaves_no_folder_behind(monkeypatch, tmp_path):
    """Without vLLM: a stand-in for the one class that is imported from it, and for its engine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    requests = SimpleNamespace(LoRARequest=lambda *args, **keys: SimpleNamespace(args=args, **keys))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    answers = iter([False, RuntimeError("rank 20 is too large"), True, True])

    def add_lora(request):
        assert (Path(request.args[2]) / "adapter_model.safetensors").is_file()
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    adapter = VllmAdapter(SimpleNamespace(add_lora=add_lora), LoraSection(rank=2), tmp_path)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{layer}.lora_A.weight": torch.ones(2, 4), f"{layer}.lora_B.weight": torch.ones(4, 2)}
    for why in (r"of version 1\.$", "of version 1: rank 20 is too large"):
        with pytest.raises(EngineError, match=why):
            adapter.load(weights.items(), 1)
        assert not [*tmp_path.iterdir()] and adapter.request is None
    adapter.load(weights.items(), 2)
    adapter.load(weights.items(), 3)
    assert [folder.name.split("-")[2] for folder in tmp_path.iterdir()] == ["3"]
    adapter.close()
    assert not [*tmp_path.iterdir()]


def test_lengths_and_precision_come_from_the_run_file_unless_they_are_given(place):
    found = arguments(place)
    assert (found["max_model_len"], found["max_num_seqs"], found["max_num_batched_tokens"]) == (100, 10, 64)
    assert (found["dtype"], found["enforce_eager"], found["enable_chunked_prefill"]) == ("bfloat16", False, True)
    assert "block_size" not in found and "kv_cache_memory_bytes" not in found
    given = arguments(place, max_model_len=120, max_num_seqs=80, dtype="float32", block_size=16)
    assert (given["max_model_len"], given["max_num_seqs"], given["max_num_batched_tokens"]) == (120, 80, 80)
    assert (given["dtype"], given["block_size"]) == ("float32", 16)
    assert arguments(place, enable_chunked_prefill=False)["max_num_batched_tokens"] == 100


@pytest.mark.parametrize("on_gpu", [True, False])
def test_logits_are_made_in_float32_as_the_trainer_makes_them(place, on_gpu):
    in_float32 = {"head_dtype": "float32"}
    assert arguments(place, on_gpu=on_gpu)["hf_overrides"] == in_float32
    assert arguments(place, on_gpu=on_gpu, dtype="float16")["hf_overrides"] == in_float32
    beside = replace(place, adapter=LoraSection(rank=4, publish="adapter"))
    assert arguments(beside, on_gpu=on_gpu)["hf_overrides"] == in_float32
    whole = replace(place, precision="float32")
    assert "hf_overrides" not in arguments(whole, on_gpu=on_gpu)
    assert arguments(whole, on_gpu=on_gpu, dtype="bfloat16")["hf_overrides"] == in_float32


def test_hone_relies_on_what_no_user_sets(place):
    found = arguments(place)
    assert found["logprobs_mode"] == "processed_logprobs"
    assert "async_scheduling" not in found, "vLLM's choice: the engine takes what is in flight"
    assert arguments(replace(place, records_routing=True))["async_scheduling"] is False
    assert found["generation_config"] == "vllm"
    assert not found.keys() & {"use", "args", "sleep_level", "distributed_executor_backend"}
    turns = VllmPlace(place.folder, "float32", 100, 10, 64, takes_turns=True)
    found = arguments(turns, tensor_parallel_size=2, gpu_memory_utilization=0.3)
    assert (found["enable_sleep_mode"], found["tensor_parallel_size"]) == (True, 2)
    assert (found["gpu_memory_utilization"], found["distributed_executor_backend"]) == (0.3, "mp")


def test_latent_attention_on_a_cpu_uses_no_rotary_kernel(place):
    assert "compilation_config" not in arguments(place, on_gpu=False)
    path = place.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "qk_rope_head_dim": 16}))
    assert arguments(place, on_gpu=False)["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert "compilation_config" not in arguments(place)


def test_a_cpus_cache_holds_every_sequence_at_its_longest(place):
    found = arguments(place, on_gpu=False)
    blocks = 10 * 4 + 1  # 100 tokens are 4 blocks of 32
    assert found["kv_cache_memory_bytes"] == blocks * 32 * (2 * 2 * 2 * 16) * 2
    assert (found["block_size"], found["enforce_eager"], found["enable_chunked_prefill"]) == (32, True, False)
    assert found["max_num_batched_tokens"] == 100  # a prompt is computed at once
    assert found["enable_sleep_mode"] is False
    assert arguments(place, on_gpu=False, kv_cache_memory_bytes=1 << 20)["kv_cache_memory_bytes"] == 1 << 20
    assert arguments(place, on_gpu=False, gpu_memory_utilization=1e-7)["kv_cache_memory_bytes"] < 50_000


def test_prompts_in_pieces_on_a_cpu_are_refused(place):
    with pytest.raises(EngineError, match="enable_chunked_prefill = true: on a CPU"):
        arguments(place, on_gpu=False, enable_chunked_prefill=True)


def test_what_vllm_would_sample_otherwise_is_refused():
    check_sampling(Sampling(4, 0.0, 5, 0.5, 0.5, (), ()))  # greedy: nothing is truncated
    check_sampling(Sampling(4, 1.0, 5, 0.5, 0.0, (), ()))
    with pytest.raises(EngineError, match="vLLM applies min_p before top_p"):
        check_sampling(Sampling(4, 1.0, 0, 0.5, 0.5, (), ()))
    with pytest.raises(EngineError, match=r"vLLM would sample with 0\.01"):
        check_sampling(Sampling(4, 0.005, 0, 1.0, 0.0, (), ()))


@pytest.fixture
def inputs(monkeypatch):
    """Stand-ins for vLLM's classes of inputs, which keep what they were given."""
    fields = SimpleNamespace(
        flat_from_sizes=lambda kind, sizes: (kind, sizes.tolist()), batched=lambda kind, **_: (kind, None)
    )
    items = SimpleNamespace(from_hf_inputs=lambda content, named: (dict(content), named))
    multimodal = SimpleNamespace(
        MultiModalFieldConfig=fields,
        MultiModalKwargsItems=items,
        PlaceholderRange=lambda start, length: (start, length),
    )
    engine = SimpleNamespace(
        tokens_input=lambda ids, **keys: {"ids": ids, **keys},
        mm_input=lambda ids, items, hashes, places, **keys: {
            "ids": ids,
            "items": items,
            "hashes": hashes["image"],
            "places": places["image"],
            **keys,
        },
    )
    monkeypatch.setitem(sys.modules, "vllm.multimodal.inputs", multimodal)
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", engine)


@pytest.mark.usefixtures("inputs")
def test_vllm_gets_pictures_as_the_trainer_sees_them_under_hashes_of_content_and_load(tmp_path):
    model = seeing_model("qwen2_5_vl")
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config.to_dict()))
    pictures = VllmPictures(tmp_path, torch.float32)
    one, other = (picture(model, seed, 2, 3) for seed in (0, 1))
    prompt, twin = prompt_with([one, other, one]), prompt_with([other, other, one])
    given = vllm_prompt(prompt, pictures.read(prompt), 0)
    content, named = given["items"]
    expected = model.vision.tower.inputs(prompt.pictures)
    assert torch.equal(content["pixel_values"], expected["pixel_values"])
    assert torch.equal(content["image_grid_thw"], expected["image_grid_thw"])
    assert named["pixel_values"] == ("image", [24, 24, 24])
    assert given["ids"] == prompt.token_ids.tolist()
    assert given["places"] == [(p.start, p.num_tokens) for p in prompt.pictures]
    first, second, third = given["hashes"]
    assert first == third != second
    assert vllm_prompt(twin, None, 0) == {"ids": given["ids"], "cache_salt": given["cache_salt"]}
    assert vllm_prompt(twin, pictures.read(twin), 0)["hashes"] == [second, second, first]
    later = vllm_prompt(prompt, pictures.read(prompt), 1)
    assert not {*later["hashes"]} & {*given["hashes"]} and later["cache_salt"] != given["cache_salt"]
    text = prompt_with([])
    assert pictures.read(text) is None
    half = VllmPictures(tmp_path, torch.bfloat16).read(prompt)[0]["pixel_values"]
    assert torch.equal(half, expected["pixel_values"].bfloat16())


def test_a_model_with_a_vision_tower_has_a_processor_and_no_larger_pictures_than_prompts(place):
    assert "mm_processor_kwargs" not in arguments(place)
    keys = {**json.loads((place.folder / "config.json").read_text()), "model_type": "qwen2_5_vl"}
    (place.folder / "config.json").write_text(json.dumps(keys))
    found = arguments(replace(place, picture_pixels=(784, 7840)))
    assert found["mm_processor_kwargs"] == {"size": {"shortest_edge": 784, "longest_edge": 7840}}
    assert not found["skip_tokenizer_init"] and not found["mm_device_do_normalize"] and not found["skip_mm_profiling"]


@pytest.mark.parametrize(
    ("most", "columns", "found"),
    [
        (784 * 16, ("image",), (3136, 784 * 16)),
        (784 * 999, ("image",), (3136, 784 * 64)),  # the model's own bound is lower
        (784, ("image",), (3136, 3136)),
        (784 * 16, (), (3136, 3136)),
    ],
)
def test_vllm_expects_pictures_as_large_as_the_run_has_them(most, columns, found):
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 3136, "max_pixels": 784 * 64}
    data = DataSection(train="rows.jsonl", chat=True, image_columns=columns, max_image_pixels=most)
    assert picture_pixels(data, {"preprocessor_config.json": json.dumps(processor)}) == found
    tiles = {"preprocessor_config.json": json.dumps({"image_processor_type": "GotOcr2ImageProcessor"})}
    assert picture_pixels(data, tiles) is None and picture_pixels(data, {}) is None


def test_other_accelerators_than_gpus_are_refused_aloud(place, monkeypatch):
    monkeypatch.setattr("hone.rollout.vllm.device_of", lambda wanted, key: torch.device("privateuseone"))
    options = {"decode": str, "eos_ids": (), "timeout_s": 1.0, "start_timeout_s": 1.0}
    with pytest.raises(EngineError, match=r"this machine has an accelerator of type `privateuseone`. Set cluster"):
        asyncio.run(VllmEngine.start(place, EngineSection(), **options))
