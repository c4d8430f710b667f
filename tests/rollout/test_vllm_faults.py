"""vLLM that hangs, that dies half-way through new weights, or that cannot start. Real vLLM, an engine for each."""

import asyncio
import threading

import pytest
import tiny_engines
from tiny_engines import letters, request
from vllm_engines import Vllm, model_for_vllm, save

from hone.errors import EngineError
from hone.rollout.vllm_args import check_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


def test_after_half_a_version_it_waits_for_a_whole_one_and_samples_from_that(tmp_path):
    first, second = model_for_vllm(seed=0), model_for_vllm(seed=1)
    vllm = Vllm(save(first, tmp_path / "hf"))
    one = request([5, 6], temperature=0.0)

    async def sample_and_load():
        sampling = asyncio.create_task(vllm.engine.generate(one))
        done, _ = await asyncio.wait({sampling}, timeout=1.0)
        assert not done, "nothing is sampled from half a version"
        await vllm._send(list(second.named_weights()), 1)
        return await sampling

    try:
        with pytest.raises(EngineError, match=r"weights: \d+ of \d+ did not come"):
            vllm.load(list(second.named_weights())[:9], 1)
        assert vllm.engine.version == 0
        ((mine,), (theirs,)) = vllm.run(sample_and_load()), tiny_engines.generate(second, [one])[0]
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert [span.version for span in mine.versions] == [1]
    finally:
        vllm.close()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda weights: [*weights, weights[0]], "each comes once"),
        (lambda weights: [(f"{name}x", weight) for name, weight in weights], "is none of it"),
        (lambda weights: [(name, weight[:1]) for name, weight in weights], "has shape"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, spoil, said):
    model = model_for_vllm()
    vllm = Vllm(save(model, tmp_path / "hf"))
    try:
        with pytest.raises(EngineError, match=said):
            vllm.load(spoil(list(model.named_weights())), 1)
    finally:
        vllm.close()


def test_a_step_that_hangs_is_given_up(tmp_path):
    hung, release = threading.Event(), threading.Event()

    def hangs(token_ids):
        hung.set()
        assert release.wait(100)
        return letters(token_ids)

    vllm = Vllm(save(model_for_vllm(), tmp_path / "hf"))
    vllm.generate([request([5])])  # the first step is slow by itself
    vllm.engine._decode = hangs
    vllm.engine._worker._timeout_s = 1.0
    try:
        with pytest.raises(EngineError, match="the engine made no step in 1 s"):
            vllm.generate([request([5])])
        assert hung.is_set()
    finally:
        release.set()
        vllm.close()


def test_what_vllm_says_when_it_cannot_start_is_reported(tmp_path):
    folder = save(model_for_vllm(), tmp_path / "hf")
    with pytest.raises(EngineError, match=r"vLLM could not start with .*NO_SUCH"):
        Vllm(folder, {"attention_backend": "NO_SUCH"})


def test_the_versions_that_are_supported_are_those_of_the_extra():
    import vllm

    check_version(vllm.__version__)
    for other in ("0.31.2", "0.33.0"):
        with pytest.raises(EngineError, match=f"vLLM {other} is installed, and Hone works with <0.33,>=0.32"):
            check_version(other)


def test_an_engine_that_gives_no_memory_away_wakes_with_the_weights_it_had(tmp_path):
    vllm = Vllm(save(model_for_vllm(), tmp_path / "hf"))
    try:
        one = request([5, 6], temperature=0.0)
        before = vllm.generate([one])
        vllm.run(vllm.engine.sleep())
        vllm.run(vllm.engine.wake())
        assert vllm.generate([one]) == before
    finally:
        vllm.close()
