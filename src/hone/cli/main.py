"""`hone`: the command line, and exit codes.

Exit codes: 0 done, 1 failed, 2 the user's file, data or arguments are wrong, 3 a reward, a service or Ray was lost,
4 out of memory with nothing left to try, 5 imported with gaps, 6 ended by an alarm (observe.stop_on), 130 stopped by
the user.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

import hone
from hone.cli import (
    check,
    compare_runs,
    doctor,
    evaluate,
    explain,
    export,
    importing,
    plan,
    report,
    serve,
    services,
    train,
    ui,
)
from hone.errors import HoneError, Stopped
from hone.observe.console import Lasting
from hone.runtime.processes import YOUNG_OBJECTS

_UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""What a wrong option or argument raises: of the click inside Typer or of the installed one, by Typer's version."""

app = typer.Typer(
    name="hone",
    help="RL post-training for language models, from one YAML file.",
    epilog="Start with `hone check RUN.yaml`, then `hone train RUN.yaml`. `hone VERB --help` has examples.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it prints local variables, and those may hold what must not be logged
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("explain", epilog=explain.EXAMPLES)(explain.explain)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("compare", epilog=compare_runs.EXAMPLES)(compare_runs.compare)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("ui", epilog=ui.EXAMPLES)(ui.ui)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan_command)
app.command("import", epilog=importing.EXAMPLES)(importing.import_command)
app.command("eval", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("eval-judge", epilog=evaluate.JUDGE_EXAMPLES)(evaluate.evaluate_judge)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.command("up", epilog=services.UP_EXAMPLES)(services.up)
app.command("status", epilog=services.STATUS_EXAMPLES)(services.status)
app.command("stop", epilog=services.STOP_EXAMPLES)(services.stop)
app.add_typer(serve.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hone {hone.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code.

    Args:
        arguments: without the program's name; None takes the process's own.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", spin_count())  # read when torch is loaded, which happens after this
    # Torch and Transformers bring a million objects that stay; full collections while they are imported take a tenth
    # of the processor time of a start.
    gc.set_threshold(YOUNG_OBJECTS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as of stderr: what a terminal cannot show ends no command
    with redirect_stderr(cast(TextIO, Lasting(sys.stderr))):  # a closed terminal ends no run
        return _outcome(arguments)


def spin_count(load: Path = Path("/proc/loadavg")) -> str:
    """How often an OpenMP thread looks for work before it sleeps.

    Threads that wait for each other by spinning starve as soon as anything else runs: with OpenMP's own 300,000, steps
    of 0.1 s became steps of 4 s beside one busy process. There 5,000 is up to twice as fast as 20,000, which saves 7 to
    14 % of a step on an idle machine.
    """
    for _ in range(3):  # a process that is busy for long is there every time
        try:
            running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            break
        if running <= 1:  # this process
            return "20000"
        time.sleep(0.005)
    return "5000"


def _outcome(arguments: Sequence[str] | None) -> int:
    try:
        outcome = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except HoneError as error:
        print(error, file=sys.stderr)
        _print_problems(arguments, error.problems)
        return error.exit_code
    except _UsageError as error:
        error.show()
        _print_problems(arguments, [error.format_message()])
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return Stopped.exit_code
    except Exception as error:  # boundary: whatever else arrives here is a mistake in Hone and is shown whole
        if isinstance(error, OSError) and _is_of_the_disk(error):
            place = error.filename or "a file or the output"
            print(f"{place}: {error.strerror}. Make room or name another place, then try again.", file=sys.stderr)
            return 1
        traceback.print_exc()
        report = f"This is a bug in Hone {hone.__version__}. Please report it, with the lines above and the run file."
        print(f"\n{report}", file=sys.stderr)
        return 1


def _print_problems(arguments: Sequence[str] | None, problems: Sequence[str]) -> None:
    """With --json what went wrong is a document too, with the keys that `hone check --json` has."""
    if "--json" in (sys.argv[1:] if arguments is None else arguments):
        typer.echo(json.dumps({"ok": False, "problems": list(problems)}, indent=2))


def _is_of_the_disk(error: OSError) -> bool:
    """Whether a place that the user chose cannot hold what is to be written there."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return error.filename is not None and error.errno in (errno.EROFS, errno.EACCES, errno.EIO, errno.ENAMETOOLONG)


if __name__ == "__main__":
    sys.exit(main())
