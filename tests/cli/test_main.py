import contextlib
import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

import hone
from hone.cli import main as cli
from hone.cli.main import spin_count
from hone.errors import GateError, HoneError, MemoryExhausted, RewardError, RunFolderError, Stopped

VERBS = ("train", "check", "explain", "eval", "export")


def test_help_lists_the_verbs_and_where_to_start(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {verb} ", out, re.MULTILINE) for verb in VERBS)
    assert "hone check RUN.yaml" in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_name_it(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    examples = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(line.startswith(f"    hone {verb} ") for line in examples if line)


def test_keys_in_examples_of_help_are_written_as_the_command_line_takes_them():
    examples = [words for command in cli.app.registered_commands for words in (command.epilog or "").split()]
    keys = [word.partition("=")[0] for word in examples if re.match(r"[a-z_.]+\S*=", word)]
    assert len(keys) > 5
    assert all(re.fullmatch(r"[a-z_]+(\.\w+)*", key) for key in keys)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hone {hone.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["train", "run.yaml", "--no-such"], "No such option"),
        (["train", "run.yaml", "--resume", "--fresh"], "--resume and --fresh exclude each other"),
        (["explain", "run.yaml", "seed", "stages"], "one key at a time (got seed, stages)"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, said, capsys):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFolderError("in use"), 2), (RewardError("no service"), 3), (MemoryExhausted("too small"), 4),
        (GateError("differs"), 1), (Stopped("stopped"), 130), (HoneError("other"), 1),
    ],
)  # fmt: skip
def test_our_errors_are_printed_plainly_and_set_the_exit_code(error, code, capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", raises(error))
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"{error}\n"


def test_an_interrupt_exits_with_130(capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", raises(KeyboardInterrupt()))
    assert cli.main([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_shows_its_traceback_and_asks_to_be_reported(capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", raises(ZeroDivisionError("in the middle")))
    assert cli.main([]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: in the middle" in err
    assert err.rstrip().endswith("Please report it, with the lines above and the run file.")


def test_what_an_output_cannot_show_is_escaped(monkeypatch):
    """A reward's message may hold half a surrogate pair, and a terminal may know ASCII alone."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(cli, "app", lambda **_: print("\ud800ü", end=""))
    assert cli.main([]) == 0
    assert shown.getvalue() == rb"\ud800\xfc"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_an_output_that_is_full_is_no_bug(run_file, capsys, monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["explain", str(run_file)]) == 1
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # what is still buffered
            full.flush()
    said = capsys.readouterr().err
    assert said.startswith("a file or the output: No space left on device. Make room or name another place")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG])
def test_a_place_that_holds_no_file_is_no_bug(number, capsys, monkeypatch):
    monkeypatch.setattr(cli, "app", raises(OSError(number, os.strerror(number), "there")))
    assert cli.main([]) == 1
    assert capsys.readouterr().err.startswith(f"there: {os.strerror(number)}. Make room or name another place")


def test_a_config_error_is_all_its_problems_and_nothing_else(run_file, capsys):
    assert cli.main(["train", str(run_file), "rollout.groupsize=3", "seed=-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line  seed: must be at least 0 (got -1). Nearest: 0",
        "command line  rollout.groupsize: unknown key. Did you mean rollout.group_size?",
    ]


def raises(error: BaseException):
    def app(**_):
        raise error

    return app


def test_ui_refuses_a_file_and_says_of_a_folder_that_it_is_not_there_yet(run_file, tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("hone.ui.server.run_ui", lambda folder, port: shown.append(folder))
    assert cli.main(["ui", str(run_file)]) == 2
    assert "is a file; name a folder with runs" in " ".join(capsys.readouterr().err.split())
    assert not shown
    assert cli.main(["ui", str(tmp_path)]) == 0
    assert not capsys.readouterr().err
    assert cli.main(["ui", str(tmp_path / "runs")]) == 0
    assert "runs does not exist yet; runs are shown as soon as they are there" in capsys.readouterr().err
    assert shown == [tmp_path, tmp_path / "runs"]


@pytest.mark.parametrize(
    ("load", "count"), [("0.20 0.1 0.1 1/321 77", "20000"), ("0.10 0.1 0.1 3/321 77", "5000"), ("", "5000")]
)
def test_openmp_threads_spin_for_long_on_an_idle_machine_alone(tmp_path, load, count):
    (tmp_path / "loadavg").write_text(load)
    assert spin_count(tmp_path / "loadavg") == count
    assert spin_count(tmp_path / "none") == "5000", "not Linux"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "nothing.yaml"], "nothing.yaml  does not exist."),
        (["explain", "nothing.yaml"], "nothing.yaml  does not exist."),
        (["doctor", "nothing"], "nothing: there is no run here. Name the run.dir that `hone train` printed."),
        (["compare", "nothing"], "nothing: there is no run here. Name the run.dir that `hone train` printed."),
        (["import", "nothing.sh"], "nothing.sh: cannot be read: No such file or directory"),
        (["plan"], "Invalid value: name a run file, or a run's folder with --compare"),
    ],
)
def test_with_json_problems_are_a_document_too(words, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"ok": False, "problems": [problem]}
    assert problem in printed.err
    assert cli.main(words) == 2
    assert capsys.readouterr().out == ""
