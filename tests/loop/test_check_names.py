"""A directory whose weights have other names than those that the trainer publishes is named before vLLM starts."""

import asyncio
from types import SimpleNamespace

import pytest
from moe_models import moe_model

from hone.assemble.models import starting_folder
from hone.config.run import RunConfig
from hone.errors import DataError
from hone.model.load import save_hf
from hone.run.check import CheckReport, check_class
from hone.run.refusals import refused_by_names

REFUSED = "model.path: {folder}: .* weights have other names or shapes than those that the trainer publishes: model.lay"


def config_of(engine="vllm", **sections):
    cluster = {"backend": "ray", "engines": {"use": engine}}
    return RunConfig.model_validate({"model": {"path": "hf"}, "data": {"train": "d"}, "cluster": cluster} | sections)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A mixture of experts under the names of Transformers' class, as a `state_dict` has them."""
    model, folder = moe_model("qwen3_moe"), tmp_path_factory.mktemp("model") / "hf"
    save_hf(folder, model.hf_config, model.hf.state_dict().items())
    return model.hf_config, folder


def test_names_matter_to_vllm_that_is_sent_all_weights(fused):
    architecture, folder = fused
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in refused_by_names(config_of(), architecture, folder)
    adapter = {"lora": {"rank": 4, "publish": "adapter"}}
    for config in (config_of("hone"), config_of(stages=["sft", "rl"]), config_of(**adapter)):
        assert not refused_by_names(config, architecture, folder)


def test_check_reports_it(fused):
    architecture, folder = fused
    found = {engine: CheckReport() for engine in ("vllm", "hone")}
    for engine, report in found.items():
        asyncio.run(check_class(config_of(engine), folder.parent, None, report))
    (problem,) = found["vllm"].problems
    assert problem == refused_by_names(config_of(), architecture, folder)
    assert not found["hone"].problems


def test_a_run_ends_before_an_engine_starts(fused):
    _, folder = fused
    loaded = SimpleNamespace(config=config_of(), run_file=folder.parent / "run.yaml", located=lambda text: text)
    with pytest.raises(DataError, match=REFUSED.format(folder=folder)):
        starting_folder(SimpleNamespace(loaded=loaded, folder=SimpleNamespace(path=folder.parent)))


@pytest.mark.parametrize("model", [{"path": "hf"}, {"init": {"model_type": "qwen3", "hidden_size": "wide"}}])
def test_keys_of_a_model_that_no_class_takes_are_a_problem(tmp_path, model):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    report = CheckReport()
    config = RunConfig.model_validate({"model": model, "data": {"train": "d"}})
    asyncio.run(check_class(config, tmp_path, None, report))
    assert not report.not_checked
    (problem,) = report.problems
    assert "Field 'hidden_size' expected int, got str (value: 'wide')" in problem


def test_a_model_of_the_hub_that_cannot_be_had_now_is_not_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("hone.run.refusals.can_resolve", lambda _: False)
    report = CheckReport()
    config = RunConfig.model_validate({"model": {"path": "owner/none-here"}, "data": {"train": "d"}})
    asyncio.run(check_class(config, tmp_path, None, report))
    assert not report.problems
    assert "whether engine and trainer can run the model: model.path: owner/none-here" in report.not_checked[0]
