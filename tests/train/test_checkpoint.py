"""Checkpoints come back as they were saved, or not at all and with a reason."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.errors import CheckpointError
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress

FILES = ["tensors.safetensors", "state.json", "manifest.json"]


def tensors(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64, 32), fill), "bias": torch.full((3,), fill, dtype=torch.bfloat16)}


def save(folder: Path, *steps: int, keep: int = 2, stage: str = "rl") -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(Progress(stage=stage, step=step), LiveSnapshot(tensors(step), {"optimizer_step": step}))
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(tmp_path):
    saved = {
        "bf16": torch.randn(5, 7).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "counts": torch.arange(5),
    }
    saved["shares_memory"] = saved["counts"][1:3]
    progress = Progress(stage="rl", step=7, next_prompt=224, evaluated_step=3, metrics_bytes=12345)
    rest = {"lr": 1e-6, "third": 1 / 3, "nested": {"list": [1, None, "ü"]}}

    path = Checkpoints(tmp_path, 2).save(progress, LiveSnapshot(saved, rest))
    loaded = Checkpoints(tmp_path, 2).newest()

    assert loaded is not None and loaded.path == path == tmp_path / "step-000007"
    assert (loaded.progress, loaded.rest, loaded.skipped) == (progress, rest, ())
    assert loaded.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded.tensors[name].dtype == tensor.dtype and torch.equal(loaded.tensors[name], tensor), name


def test_the_tensors_file_is_plain_safetensors(tmp_path):
    path = Checkpoints(tmp_path, 2).save(Progress(), LiveSnapshot(tensors(), {}))
    assert torch.equal(load_file(path / "tensors.safetensors")["weight"], tensors()["weight"])


def test_what_is_sent_to_a_process_with_another_working_directory_is_found_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = save(Path("here"), 1).newest()
    sent = pickle.dumps(loaded.tensors)
    monkeypatch.chdir("/")
    assert torch.equal(pickle.loads(sent)["weight"], tensors(1)["weight"])


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "absent", 2).newest() is None


def test_the_newest_few_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=3)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


def test_a_later_stage_is_newer_whatever_its_step(tmp_path):
    save(tmp_path, 100, 200, stage="sft")
    checkpoints = save(tmp_path, 0)
    assert [path.name for path in checkpoints.paths()] == ["sft-step-000200", "step-000000"]
    assert checkpoints.newest().progress == Progress(stage="rl", step=0)


def test_steps_beyond_six_digits_sort_as_numbers(tmp_path):
    assert save(tmp_path, 999_999, 1_000_000).newest().progress.step == 1_000_000


def test_one_step_can_be_asked_for(tmp_path):
    checkpoints = save(tmp_path, 3, 4)
    assert checkpoints.at("rl", 3).tensors["weight"][0, 0] == 3.0
    with pytest.raises(CheckpointError, match=r"step-000009: no such checkpoint.*step-000003, step-000004"):
        checkpoints.at("rl", 9)


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5)
    Checkpoints(tmp_path, 2).save(Progress(step=5), LiveSnapshot(tensors(9.0), {}))
    assert names(tmp_path) == ["step-000005"]
    assert Checkpoints(tmp_path, 2).newest().tensors["bias"][0] == 9.0


def test_an_unknown_stage_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="stage"):
        Checkpoints(tmp_path, 2).save(Progress(stage="dpo"), LiveSnapshot(tensors(), {}))
    assert names(tmp_path) == []


def test_values_that_are_not_json_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        Checkpoints(tmp_path, 2).save(Progress(), LiveSnapshot(tensors(), {"tensor": torch.ones(2)}))
    assert names(tmp_path) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, alter, empty, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_a_torn_checkpoint_is_skipped_with_a_reason(tmp_path, file, damage):
    checkpoints = save(tmp_path, 1, 2)
    damage(tmp_path / "step-000002" / file)

    loaded = checkpoints.newest()

    assert loaded.progress.step == 1 and loaded.tensors["weight"][0, 0] == 1.0
    assert len(loaded.skipped) == 1 and "step-000002 is not whole" in loaded.skipped[0]
    assert file in loaded.skipped[0]


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.99])
def test_no_byte_of_the_manifest_can_change_unseen(tmp_path, position):
    path = save(tmp_path, 1).paths()[0] / "manifest.json"
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="manifest"):
        Checkpoints(tmp_path, 2).load(path.parent)


def test_when_none_is_whole_the_run_does_not_start_from_nothing(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    for path in checkpoints.paths():
        empty(path / "state.json")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is whole") as caught:
        checkpoints.newest()
    assert "--fresh" in str(caught.value)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000009")
    with pytest.raises(CheckpointError, match="it holds step-000001"):
        Checkpoints(tmp_path, 2).newest()


def test_another_format_is_named(tmp_path):
    manifest = save(tmp_path, 1).paths()[0] / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3}))
    with pytest.raises(CheckpointError, match="format 3; this version of Hone reads 2"):
        Checkpoints(tmp_path, 2).newest()


def test_a_torn_newest_never_costs_the_one_just_saved(tmp_path):
    checkpoints = save(tmp_path, 1, 9, keep=2)
    empty(tmp_path / "step-000009" / "state.json")
    Checkpoints(tmp_path, 1).save(Progress(step=5), LiveSnapshot(tensors(), {}))
    assert checkpoints.newest().progress.step == 5


def test_a_replacement_cut_short_between_its_renames_loses_nothing(tmp_path):
    save(tmp_path, 4, 5)
    (tmp_path / "step-000005").rename(tmp_path / ".replaced-step-000005")
    (tmp_path / ".tmp-step-000005").mkdir()
    assert Checkpoints(tmp_path, 2).newest().progress.step == 5

    save(tmp_path, 5)  # the resumed run arrives there again
    assert names(tmp_path) == ["step-000004", "step-000005"]


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".tmp-step-000003").mkdir()
    (tmp_path / ".tmp-step-000003" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / ".removed-step-000001").mkdir()
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000004"]


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "best").mkdir()
    save(tmp_path, 1, 2, 3, keep=1)
    assert names(tmp_path) == ["best", "notes.txt", "step-000003"]
