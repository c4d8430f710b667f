import json
import sys
from types import ModuleType

import pytest

from hone.cli.main import main
from hone.config.load import Loaded
from hone.errors import DataError
from hone.run.report import CheckReport


@pytest.fixture
def build(monkeypatch):
    """Stands for `hone.assemble`, which is heavy: `assemble.answer` is what `check_run` gives or raises."""
    import hone

    module = ModuleType("hone.assemble")
    module.answer = CheckReport()  # type: ignore[attr-defined]

    def check_run(loaded: Loaded, *, start_services: bool) -> CheckReport:
        answer = module.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    module.check_run = check_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hone.assemble", module)
    monkeypatch.setattr(hone, "assemble", module, raising=False)
    return module


REPORT = CheckReport(
    lines=["prompt [1]: 1+1= -> 4 tokens"], figures={"train rows": 1, "gold answers scored by exact": 1.0}
)


def test_a_good_run(run_file, build, capsys):
    build.answer = REPORT
    assert main(["check", str(run_file)]) == 0
    out = capsys.readouterr().out
    assert "prompt [1]: 1+1= -> 4 tokens\n" in out
    assert "gold answers scored by exact  1\n" in out
    assert out.endswith("ok  ready to train\n")


def test_a_good_run_as_json(run_file, build, capsys):
    build.answer = REPORT
    assert main(["check", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT.as_dict()


def test_problems_of_the_data_exit_with_2(run_file, build, capsys):
    build.answer = CheckReport(problems=["reward exact: 3 of 10 gold answers score 0 [/odd]"], warnings=["odd lr"])
    assert main(["check", str(run_file)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "problem  reward exact: 3 of 10 gold answers score 0 [/odd]" in lines
    assert "warning  odd lr" in lines
    assert not any(line.startswith("ok") for line in lines)


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_on_the_way_is_reported_in_the_form_asked_for(run_file, build, capsys, as_json):
    build.answer = DataError("train.jsonl:3: malformed JSON")
    assert main(["check", str(run_file), *["--json"] * as_json]) == 2
    captured = capsys.readouterr()
    if as_json:
        assert json.loads(captured.out)["problems"] == ["train.jsonl:3: malformed JSON"]
    else:
        assert captured.err == "train.jsonl:3: malformed JSON\n"


def test_config_problems_come_before_anything_heavy(run_file, build, capsys):
    build.answer = AssertionError("must not be asked")
    assert main(["check", str(run_file), "rollout.group_size=0", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["problems"] == ["command line  rollout.group_size: must be at least 1 (got 0). Nearest: 1"]
