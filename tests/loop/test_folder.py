"""Who may write into a run's folder, and what resuming and starting afresh do to it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hone.errors import RunFolderError
from hone.run.folder import RunFolder, identity_of
from hone.train.checkpoint import Checkpoints
from hone.train.tensor_files import LiveSnapshot
from hone.types import Progress

CONFIG = {
    "seed": 0,
    "stages": ("sft", "rl"),
    "run": {"dir": "runs/x", "steps": 100, "threads": 0},
    "train": {"optimizer": {"lr": 1e-6, "betas": (0.9, 0.95)}, "tokens_per_microbatch": 4096},
    "reward": {"components": [{"use": "exact", "args": {}}]},
    "eval": {"every": 10},
    "cluster": {"backend": "local", "engines": {"use": "hone"}},
}


def start(path: Path, config=CONFIG, **how) -> RunFolder:
    return RunFolder.open(path, run_file=Path("run.yaml"), run_yaml="seed: 0  # default\n", config=config, **how)


def changed(**sections) -> dict:
    return {**CONFIG, **{name: {**CONFIG[name], **value} for name, value in sections.items()}}


def test_a_new_folder_is_made_and_says_whose_it_is(tmp_path):
    with start(tmp_path / "runs" / "x") as folder:
        assert folder.run_yaml.read_text() == "seed: 0  # default\n"
        assert folder.identity()["run"]["steps"] == 100
        assert not folder.resumed and folder.moved_aside is None
        assert folder.checkpoints == tmp_path / "runs" / "x" / "checkpoints"


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    start(tmp_path).close()
    assert (tmp_path / "run.yaml").exists()


def test_a_folder_with_a_run_needs_a_decision(tmp_path):
    start(tmp_path / "x").close()
    with pytest.raises(RunFolderError) as caught:
        start(tmp_path / "x")
    for way_on in ("--resume", "--fresh", "x.old-1", "run.dir="):
        assert way_on in str(caught.value)


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"fresh": True}])
def test_other_peoples_files_are_never_touched(tmp_path, how):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"not the folder of a Hone run: it holds thesis\.tex"):
        start(tmp_path, **how)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not (tmp_path / "run.yaml").exists()


def test_fresh_moves_the_old_run_aside_and_loses_nothing(tmp_path):
    for number in (1, 2):
        start(tmp_path / "x", fresh=True).close()
        (tmp_path / "x" / "metrics.jsonl").write_text(f"run {number}")
    with start(tmp_path / "x", fresh=True) as folder:
        assert folder.moved_aside == tmp_path / "x.old-2"
        assert not folder.metrics.exists() and folder.run_yaml.exists()
    assert (tmp_path / "x.old-1" / "metrics.jsonl").read_text() == "run 1"
    assert (tmp_path / "x.old-2" / "metrics.jsonl").read_text() == "run 2"


def test_resume_continues_a_run_and_starts_one_where_there_is_none(tmp_path):
    with start(tmp_path / "x", resume=True) as folder:
        assert not folder.resumed
    with start(tmp_path / "x", resume=True) as folder:
        assert folder.resumed


def test_resume_and_fresh_exclude_each_other(tmp_path):
    with pytest.raises(RunFolderError, match="exclude each other"):
        start(tmp_path, resume=True, fresh=True)


def test_resume_with_other_numbers_is_refused_and_names_every_changed_key(tmp_path):
    start(tmp_path).close()
    other = changed(train={"optimizer": {"lr": 3e-4, "betas": (0.9, 0.95)}}) | {"seed": 1}
    del other["reward"]
    with pytest.raises(RunFolderError) as caught:
        start(tmp_path, other, resume=True)
    message = str(caught.value)
    assert "  seed: 0 -> 1\n" in message
    assert "  train.optimizer.lr: 1e-06 -> 0.0003\n" in message
    assert '  reward.components: [{"args": {}, "use": "exact"}] -> (not set)' in message
    assert "betas" not in message and "tokens_per_microbatch" not in message
    assert RunFolder.read(tmp_path).identity()["seed"] == 0, "a refused resume changes nothing"


def test_a_run_may_resume_elsewhere_but_with_the_same_engine(tmp_path):
    start(tmp_path).close()
    pools = {"all": {"devices": 4, "roles": ["policy", "rollout"]}}
    start(tmp_path, changed(cluster={"backend": "ray", "pools": pools, "trainer": {"shard": 2}}), resume=True).close()
    with pytest.raises(RunFolderError, match=r"cluster.engines.use: \"hone\" -> \"vllm\""):
        start(tmp_path, changed(cluster={"engines": {"use": "vllm"}}), resume=True)


def test_resume_may_run_longer_and_show_more(tmp_path):
    start(tmp_path).close()
    other = changed(run={"steps": 200, "threads": 1}, eval={"every": 5}, train={"tokens_per_microbatch": 1024})
    with start(tmp_path, other, resume=True) as folder:
        assert folder.resumed and folder.identity()["run"]["steps"] == 200


def test_a_resumption_that_changes_nothing_keeps_what_run_yaml_says(tmp_path):
    start(tmp_path).close()
    (tmp_path / "run.yaml").write_text("seed: 0  # run.yaml:3\n")
    start(tmp_path, resume=True).close()
    assert (tmp_path / "run.yaml").read_text() == "seed: 0  # run.yaml:3\n"
    assert RunFolder.read(tmp_path).run_file == Path("run.yaml").absolute()
    start(tmp_path, changed(run={"steps": 200}), resume=True).close()
    assert (tmp_path / "run.yaml").read_text() == "seed: 0  # default\n"


def test_a_hint_only_where_there_is_a_checkpoint(tmp_path):
    with start(tmp_path / "a b") as folder:
        assert folder.resume_hint() == "stopped before the first checkpoint"
        (folder.checkpoints / ".tmp-step-000003").mkdir(parents=True)
        assert folder.resume_hint() == "stopped before the first checkpoint"
        (folder.checkpoints / "step-000003").mkdir()
        assert f"`hone train --resume '{folder.path}'`" in folder.resume_hint()


def test_the_hint_names_a_command_that_a_shell_finds(tmp_path, monkeypatch):
    """`make quickstart` calls .venv/bin/hone, which is not on the PATH."""
    program = tmp_path / "the bin" / "hone"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [str(program)])
    with start(tmp_path / "run") as folder:
        (folder.checkpoints / "step-000003").mkdir(parents=True)
        assert f"`'{program}' train --resume {folder.path}`" in folder.resume_hint()
        monkeypatch.setenv("PATH", str(program.parent))
        assert f"`hone train --resume {folder.path}`" in folder.resume_hint()


def test_only_a_live_run_can_be_stopped(tmp_path):
    start(tmp_path).close()
    with pytest.raises(RunFolderError, match="no run is active there"):
        RunFolder.read(tmp_path).stop(timeout_s=5)
    with start(tmp_path, resume=True) as folder:
        (tmp_path / ".lock").write_text("process 1 on another-host")
        with pytest.raises(RunFolderError, match="process 1 on another-host cannot be asked to stop"):
            folder.stop(timeout_s=5)


def test_a_second_run_in_the_folder_learns_who_holds_it(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from hone.run.folder import RunFolder\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "folder = RunFolder.open(Path(sys.argv[1]), run_file=Path('x'), run_yaml='', config={})\n"
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for how in ({}, {"resume": True}, {"fresh": True}):
            with pytest.raises(RunFolderError, match=f"in use by process {holder.pid} on "):
                start(tmp_path / "x", **how)
        assert not (tmp_path / "x.old-1").exists()
        with pytest.raises(RunFolderError, match=rf"process {holder.pid} has not ended within 0.2 s"):
            RunFolder.read(tmp_path / "x").stop(timeout_s=0.2)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with start(tmp_path / "x", {}, resume=True) as folder:  # a killed run holds nothing
        assert folder.resumed


def test_a_closed_folder_can_be_taken_again_by_the_same_process(tmp_path):
    start(tmp_path).close()
    start(tmp_path, resume=True).close()


def test_a_refused_open_lets_the_folder_go(tmp_path):
    start(tmp_path).close()
    for _ in range(2):
        with pytest.raises(RunFolderError, match="holds a run already"):
            start(tmp_path)


def test_a_start_that_was_killed_half_way_is_not_in_the_way(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on gone")
    (tmp_path / ".identity.json.new").write_text('{"se')
    start(tmp_path).close()


def test_a_broken_identity_is_named(tmp_path):
    start(tmp_path).close()
    (tmp_path / ".identity.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"\.identity\.json cannot be read.*--fresh"):
        start(tmp_path, resume=True)


def test_reading_needs_no_lock_but_a_run(tmp_path):
    with start(tmp_path):
        assert RunFolder.read(tmp_path).identity() == json.loads(json.dumps(CONFIG))
    with pytest.raises(RunFolderError, match="there is no run here"):
        RunFolder.read(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunFolderError, match="Permission denied"):
        start(tmp_path / "x")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot make a run's folder here.*run\.dir"):
        start(tmp_path / "x")


def test_a_look_at_a_running_run(tmp_path):
    with RunFolder.open(tmp_path / "run", run_file=Path("x"), run_yaml="", config={}) as held:
        folder = RunFolder.read(tmp_path / "run")
        assert folder.is_in_use() and folder.last_metrics(1) == []
        lines = [{"stage": "rl", "step": step, "time_s": step} for step in (1, 2)]
        held.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"st')
        assert folder.last_metrics(1) == lines[1:]
    assert not folder.is_in_use()


def test_services_may_move_between_a_run_and_its_resumption(tmp_path):
    def config(**service):
        return {"services": {"judge": {"command": ["serve"], "port": 0} | service}}

    RunFolder.open(tmp_path / "run", run_file=Path("x"), run_yaml="", config=config()).close()
    RunFolder.open(
        tmp_path / "run", run_file=Path("x"), run_yaml="", config=config(port=8000, devices=[7]), resume=True
    ).close()
    with pytest.raises(RunFolderError, match=r"services.judge.command: .* -> "):
        RunFolder.open(tmp_path / "run", run_file=Path("x"), run_yaml="", config=config(command=["other"]), resume=True)


def test_a_torn_identity_is_rebuilt_from_the_newest_checkpoint(tmp_path):
    start(tmp_path).close()
    for torn in ("", None):  # None: gone
        run = identity_of(Path("run.yaml"), CONFIG)
        Checkpoints(tmp_path / "checkpoints", 2, run).save(Progress(step=3), LiveSnapshot({}, {}))
        identity = tmp_path / ".identity.json"
        identity.write_text(torn) if torn is not None else identity.unlink()
        with pytest.raises(RunFolderError, match="seed: 0 -> 1"):
            start(tmp_path, CONFIG | {"seed": 1}, resume=True)
        with start(tmp_path, resume=True) as folder:
            assert "rebuilt from the newest checkpoint" in folder.notes[0] and folder.identity()["seed"] == 0


@pytest.mark.parametrize("how", ["gone", "empty", "a link to nothing"])
def test_records_without_their_checkpoints_are_no_new_run(tmp_path, how):
    start(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "events.jsonl").write_text('{"kind": "saved", "step": 1}\n')
    if how != "empty":
        (tmp_path / "checkpoints").rmdir()
    if how == "a link to nothing":
        (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(
        RunFolderError, match=r"checkpoints is (empty or missing|a link to nothing), though the run has"
    ):
        start(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").exists()


def test_what_leads_nowhere_and_what_is_half_written_is_set_aside(tmp_path):
    start(tmp_path).close()
    (tmp_path / ".hf-abc").mkdir()
    (tmp_path / "hf").symlink_to(tmp_path / "gone")
    (tmp_path / "checkpoints" / "step-000009").symlink_to(tmp_path / "gone")
    for round in ("first", "second"):
        with start(tmp_path, resume=True) as folder:
            assert len(folder.notes) == (3 if round == "first" else 1)
        (tmp_path / ".hf-abc").mkdir()
    assert {path.name for path in (tmp_path / "set-aside").iterdir()} == {"hf", "step-000009", ".hf-abc", ".hf-abc.2"}
