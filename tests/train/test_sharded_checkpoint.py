"""Ranks save what each has of the state, and go on from it: the same ones bit for bit, others with every number."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gang import Gang
from sharded_cases import Case
from sharded_states import Here, copy_state, exported, fingerprint, make, masters, restore, snapshot, update
from torch.distributed.checkpoint import HuggingFaceStorageReader

from hone.errors import CheckpointError
from hone.train.checkpoint import Checkpoints, SavedCheckpoint
from hone.types import Progress

pytestmark = pytest.mark.slow("groups of one to four ranks")


def save(ranks, folder: Path, step: int = 1) -> SavedCheckpoint:
    Checkpoints(folder, 2).save(Progress(step=step), snapshot(ranks))
    loaded = Checkpoints(folder, 2).newest()
    assert loaded is not None and loaded.progress.step == step
    return loaded


def assert_same_tensors(ours: SavedCheckpoint, theirs: SavedCheckpoint) -> None:
    assert ours.rest == theirs.rest
    assert set(ours.tensors) == set(theirs.tensors) and len(ours.tensors) > 10
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name


THREE = Case(experts=("qwen3_moe", {"num_experts": 3}))
"""Two and four ranks have some rows of each expert's matrices."""
ODD = Case(experts=("qwen3_moe", {"num_experts": 3, "hidden_size": 63, "moe_intermediate_size": 33}))
"""Where rows do not come out even, two ranks have two experts and one, and of four the last has none."""
UNSPLIT = Case(experts=("gpt_oss", {"num_local_experts": 3}))
"""A checkpoint has its stacks as they are, and biases beside them."""

LAYOUTS = [
    pytest.param(Case(), id="shards"),
    pytest.param(Case(precision="bfloat16"), id="bfloat16"),
    pytest.param(Case(mesh={"shard": 1}), id="replicas"),
    pytest.param(Case(mesh={"tensor_parallel": 2}), id="tensor parallel"),
    pytest.param(Case(mesh={"sequence_parallel": 2}), id="sequence parallel"),
    pytest.param(Case(implementation="transformers", tokens_per_microbatch=40), id="transformers"),
    pytest.param(Case(lora=True), id="adapter"),
    pytest.param(Case(offload=("parameters",)), id="offload"),
    pytest.param(Case("ppo", options={"reference_refresh_every": 2}), id="critic"),
    pytest.param(THREE, id="rows of experts"),
    pytest.param(ODD, id="rows of experts, and experts"),
    pytest.param(UNSPLIT, id="stacks of experts"),
]


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_same_ranks_continue_bit_for_bit(pair, tmp_path, case):
    pair(make, case)
    pair(update, 0, 1, 2)
    saved = save(pair, tmp_path)
    uninterrupted = pair(update, 3, 4), pair(masters)
    pair(make, case)
    pair(restore, saved.tensors, saved.rest)
    resumed = pair(update, 3, 4), pair(masters)
    assert resumed[0] == uninterrupted[0]
    for ours, theirs in zip(resumed[1], uninterrupted[1], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_ranks_hold_every_number_of_it(pair, tmp_path, case):
    """From two ranks to one process and, divided in another way, to two again."""
    pair(make, case)
    pair(update, 0)
    divided = save(pair, tmp_path / "divided")
    make(case, alone=True)
    restore(divided.tensors, divided.rest)
    alone = save(Here(), tmp_path / "alone")
    assert_same_tensors(divided, alone)
    pair(make, replace(case, mesh={}) if case.mesh else case)
    pair(restore, alone.tensors, alone.rest)
    assert_same_tensors(save(pair, tmp_path / "again"), alone)
    expected, *_ = update(1)
    bound = 1e-2 if case.precision == "bfloat16" else 1e-5
    for found, *_ in pair(update, 1):
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=bound)


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param(Case(), {}, id="shards"),
        pytest.param(Case(), {"shard": 2}, id="replicas of shards"),
        pytest.param(Case(), {"shard": 2, "tensor_parallel": 2}, id="tensor parallel"),
        pytest.param(Case(), {"sequence_parallel": 2}, id="sequence parallel"),
        pytest.param(THREE, {}, id="rows of experts"),
        pytest.param(THREE, {"shard": 2}, id="replicas of rows of experts"),
        pytest.param(ODD, {}, id="rows of experts, and experts"),
        pytest.param(UNSPLIT, {}, id="stacks of experts"),
    ],
)
def test_two_ranks_then_one_then_four(pair, four, tmp_path, case, mesh):
    pair(make, case)
    pair(update, 0)
    two = save(pair, tmp_path / "two")
    make(case, alone=True)
    restore(two.tensors, two.rest)
    one = save(Here(), tmp_path / "one")
    four(make, replace(case, mesh=mesh))
    four(restore, one.tensors, one.rest)
    again = save(four, tmp_path / "four")
    assert_same_tensors(two, one)
    assert_same_tensors(again, one)
    for ranks in (pair, four):
        assert {*ranks(fingerprint)} == {fingerprint()}, "engines get the same weights"
        assert all(files == exported() for files in ranks(exported))
    assert len(list(again.path.glob("tensors-*-of-00004.safetensors"))) == 4
    pair(restore, again.tensors, again.rest)
    (expected, *_), (found, *_) = update(1), pair(update, 1)[0]
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)


def test_a_rank_has_the_end_of_one_matrix_of_an_expert_and_the_beginning_of_the_next(pair, tmp_path):
    """The second of three ranks has the last third of the rows of gate_proj and the first of up_proj."""
    case = Case(experts=("qwen3_moe", {"hidden_size": 66, "moe_intermediate_size": 33}))
    with contextlib.closing(Gang(3)) as three:
        three(make, case)
        three(update, 0)
        divided = save(three, tmp_path / "divided")
        make(case, alone=True)
        restore(divided.tensors, divided.rest)
        assert_same_tensors(divided, save(Here(), tmp_path / "alone"))
        assert all(files == exported() for files in three(exported))
        pair(make, case)
        pair(restore, divided.tensors, divided.rest)
        again = save(pair, tmp_path / "again")
        assert_same_tensors(again, divided)
        three(make, case)
        three(restore, again.tensors, again.rest)
        (expected, *_), (found, *_) = update(1), three(update, 1)[0]
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="shards"),
        pytest.param(Case(mesh={"shard": 1}), id="replicas"),
        pytest.param(Case(mesh={"tensor_parallel": 2}), id="tensor parallel"),
        pytest.param(THREE, id="rows of experts"),
        pytest.param(ODD, id="rows of experts, and experts"),
    ],
)
def test_every_number_is_written_once(pair, tmp_path, case):
    pair(make, case)
    sizes = [size for size, _ in pair(copy_state)]
    make(case, alone=True)
    whole = snapshot(Here()).num_bytes
    assert sum(sizes) == whole
    if case.mesh != {"shard": 1}:
        assert max(sizes) < 0.6 * whole, "and each rank writes its part"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_reader_reads_the_files(pair, tmp_path):
    pair(make, Case())
    pair(update, 0)
    saved = save(pair, tmp_path)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in saved.tensors.items()}
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(saved.path)), no_dist=True)
    assert all(torch.equal(tensors[name], saved.tensors[name]) for name in tensors)


def test_a_damaged_file_of_one_rank_costs_the_checkpoint_and_is_named(pair, tmp_path):
    pair(make, Case())
    save(pair, tmp_path, step=1)
    second = save(pair, tmp_path, step=2).path / "tensors-00001-of-00002.safetensors"
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    found = Checkpoints(tmp_path, 2).newest()
    assert found is not None and found.progress.step == 1
    assert found.skipped == (f"{second.parent} is not whole: {second.name} was altered",)


def test_a_rank_whose_file_is_not_in_the_checkpoint_is_missed(pair, tmp_path):
    """As when a rank's share was never written: the manifest is valid, and the tensors are not whole."""
    pair(make, Case())
    saved = save(pair, tmp_path)
    some = type(saved.tensors)([saved.path / "tensors-00000-of-00002.safetensors"])
    with pytest.raises(CheckpointError, match="hold only parts of tensor"):
        some.box("master/model.embed_tokens.weight", (0, 0), (13, 16))


def test_what_was_copied_is_of_its_moment(pair, tmp_path):
    """Training goes on between the copy and its writing."""
    pair(make, Case())
    pair(update, 0)
    expected = pair(masters)[0]
    taken = snapshot(pair)
    pair(update, 1)
    assert not torch.equal(pair(masters)[0]["model.norm.weight"], expected["model.norm.weight"]), "witness"
    Checkpoints(tmp_path, 2).save(Progress(step=1), taken)
    loaded = Checkpoints(tmp_path, 2).newest()
    assert loaded is not None
    assert all(torch.equal(loaded.tensors[f"master/{name}"], expected[name]) for name in expected)
