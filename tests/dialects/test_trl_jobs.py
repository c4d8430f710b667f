"""Two jobs of TRL's, run there for 20 steps on a CPU, imported into Hone and given the same completions.

`trl_jobs.json` has what TRL did (record_trl_jobs.py). Hone trains on the very file that `hone import` writes: its own
rewards, advantages, losses and optimizer, with an engine that returns TRL's completions instead of sampling.
"""

import json

import pytest
from safetensors.torch import load_file
from trl_setting import RECORDED, summary, write_setting

from hone.assemble import workers
from hone.cli.main import main
from hone.config.run import OptimizerSection
from hone.dialects.reading import read_foreign
from hone.dialects.translate import translate
from hone.observe.recorder import read_samples
from hone.rollout.local import LocalEngine
from hone.train.optim import learning_rate
from hone.types import Sample, VersionSpan

TRL = json.loads(RECORDED.read_text("utf-8"))
JOBS = ("dapo.py", "classic.yaml")
PASSES = {"dapo.py": 1, "classic.yaml": 2}
"""Optimizer steps of an update."""


class Replay:
    """Gives the engine of a run TRL's completions, in the order of the data."""

    def __init__(self, updates):
        self.samples = [sample for update in updates for sample in update["samples"]]

    def engine(self, *args, **options):
        engine = embedded_engine(*args, **options)
        engine.generate = self.generating(engine)
        return engine

    def generating(self, engine: LocalEngine):
        async def generate(request, on_sample=None):
            first = request.prompt.index * request.num_samples
            recorded = self.samples[first : first + request.num_samples]
            assert all(list(request.prompt.token_ids) == one["prompt"] for one in recorded), "rows in TRL's order"
            drawn = tuple(self.sample(engine, request.prompt.id, i, one) for i, one in enumerate(recorded))
            for sample in drawn if on_sample else ():
                on_sample(sample)
            return drawn

        return generate

    def sample(self, engine, prompt_id, index, one):
        tokens = one["tokens"]
        reason = "stop" if tokens[-1] == EOS else "length"
        spans = (VersionSpan(engine.version, len(tokens)),)
        return Sample(prompt_id, index, tokens, one["logprobs"], spans, reason, engine._scheduler._decode(tokens))


EOS = 1
embedded_engine = workers.embedded_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    write_setting(folder)
    return folder


@pytest.fixture(scope="module", params=JOBS)
def trained(request, folder):
    """The record of TRL, and the folder of a run that Hone made of the imported file."""
    name = request.param
    recorded, run_file, run = TRL[name], folder / f"{name}.run.yaml", folder / f"{name}.run"
    if not run.exists():  # in a random order the two alternate, and pytest makes them again each time
        assert main(["import", str(folder / name), "--to", str(run_file)]) == 0, "nothing is missing in the run file"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers, "embedded_engine", Replay(recorded["updates"]).engine)
            assert main(["train", str(run_file), f"run.dir={run}", "observe.console=quiet"]) == 0
    return name, recorded, run


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in found if "train/loss" in line]


@pytest.mark.slow("trains for 20 steps, twice")
def test_advantages_are_equal(trained):
    name, recorded, run = trained
    for step, update in enumerate(recorded["updates"], 1):
        ours = read_samples(run, step)
        assert [one.sample.token_ids.tolist() for one in ours] == [one["tokens"] for one in update["samples"]]
        for field in ("reward", "advantage"):
            assert [getattr(one, field) for one in ours] == pytest.approx(
                [o[field] for o in update["samples"]], abs=1e-6
            )
    assert step * PASSES[name] == 20


@pytest.mark.slow("trains for 20 steps, twice")
def test_every_step_is_equal(trained):
    name, recorded, run = trained
    for number, line in enumerate(lines(run)):
        steps = recorded["steps"][number * PASSES[name] :][: PASSES[name]]
        assert line["train/lr"] == pytest.approx(steps[-1]["lr"], rel=1e-9)
        for field, metric in MEANS.items():
            theirs = sum(step[field] for step in steps) / len(steps)
            assert line[metric] == pytest.approx(theirs, rel=1e-4, abs=1e-6), (number, field)


MEANS = {"loss": "train/loss", "grad_norm": "train/grad_norm"}
MEANS |= {"clip_low": "train/clip_low_frac", "clip_high": "train/clip_high_frac"}


@pytest.mark.slow("trains for 20 steps, twice")
def test_final_weights_are_equal(trained):
    _, recorded, run = trained
    ours = summary({key: value.float() for key, value in load_file(run / "hf" / "model.safetensors").items()})
    assert ours.keys() == recorded["weights"].keys()
    for weight, theirs in recorded["weights"].items():
        assert ours[weight] == pytest.approx(theirs, rel=1e-3, abs=1e-2), weight


@pytest.mark.parametrize("recorded", TRL["schedules"], ids=lambda one: json.dumps(one["arguments"]))
def test_learning_rates_are_equal_after_warm_up_and_a_step_ahead_in_it(recorded):
    arguments = ", ".join(f"{key}={value!r}" for key, value in recorded["arguments"].items())
    imported = translate(read_foreign(f"GRPOConfig(learning_rate=1.0, max_steps=20, {arguments})", "job.py"))
    settings = {key: value for key, (value, _) in imported.settings().items()}
    prefix = "train.optimizer."
    section = OptimizerSection(
        **{key.removeprefix(prefix): settings[key] for key in settings if key.startswith(prefix)}
    )
    ours = [learning_rate(section, step, 20) for step in range(20)]
    warm = recorded["lr"].index(max(recorded["lr"]))
    assert ours[warm:] == pytest.approx(recorded["lr"][warm:], abs=1e-12)
    assert ours[:warm] == pytest.approx(recorded["lr"][1 : warm + 1], abs=1e-12)
    if warm:
        assert any("one step ahead" in line.verdict.note for line in imported.lines)
