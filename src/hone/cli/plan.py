"""The command `hone plan`: memory and time of a run before it starts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hone.cli.arguments import AsJson, examples
from hone.config.automatic import COMPILERS, AutoChoice, settled
from hone.config.load import Loaded, load_config
from hone.config.render import inline
from hone.config.rules.files import architecture_of
from hone.config.topology import topology_lines
from hone.devices import FoundDevices
from hone.doctor.noise import noise_advice
from hone.errors import MemoryExhausted
from hone.memory.calibration import with_experience
from hone.memory.record import comparison, table
from hone.observe.sinks import metric_lines
from hone.plan.hardware import THIS, Hardware, find_hardware, in_cluster
from hone.plan.knobs import whole_run
from hone.plan.ledger import Ledger, gib, percent
from hone.plan.planner import Plan, plan
from hone.plan.search import GOALS, Preset, Proposal, beyond, propose
from hone.plan.verdict import level_of
from hone.run.folder import RunFolder
from hone.runtime.files import write_whole
from hone.services.gpus import assumed_devices, settled_on

if TYPE_CHECKING:
    from hone.assemble.trace import Trace


EXAMPLES = examples(
    "hone plan run.yaml",
    "hone plan run.yaml --hardware 8xH100-80G model.path=Qwen/Qwen3-8B",
    "hone plan run.yaml --hardware A100-40G cluster.engines.tensor_parallel_size=2 --json",
    "hone plan run.yaml --hardware 8xH100-80G --preset recommended --write better.yaml --html plan.html",
    "hone plan run.yaml --hardware 8xH100-80G --trace",
    "hone plan --compare runs/sums",
)


def plan_command(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="section.key=value",
            help="Settings that override the file's, and that no preset changes.",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            metavar="8xH100-80G",
            help="Devices to plan for; `this` measures the machine in use. Without a number, as many as the run file's "
            "`cluster` section has.",
        ),
    ] = "this",
    host_memory_gib: Annotated[
        float | None, typer.Option(help="Memory of one machine, where the device's usual one is wrong.", min=1)
    ] = None,
    mean_response_tokens: Annotated[
        float | None, typer.Option(help="As measured; without it half the limit is assumed. For times only.", min=1)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Per device and hour: says what 1,000 steps cost.", min=0)] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Search for better settings of the same algorithm: short steps, with 10, 6 or 3 % of memory free; or "
            "throughput, latency or memory of judges and reward models.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the preset as a run file (--preset recommended).")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures.")] = None,
    trace: Annotated[
        bool,
        typer.Option(
            help="Compare with a trace of the real model classes, operator by operator, on a CPU and without weights."
        ),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Compare planned and measured memory and throughput of a run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory of every phase of stage rl on every kind of device, and the time of a step, and say if it fits.

    Exit code 0 when it fits or is tight, 4 when it does not fit.
    """
    if compare is not None:
        show_comparison(compare, as_json=as_json)
        return
    if run_file is None:
        raise typer.BadParameter("name a run file, or a run's folder with --compare")
    if write is not None and write.absolute().parent != run_file.absolute().parent:
        reason = f"must be beside {run_file}, whose relative paths start there"
        raise typer.BadParameter(reason, param_hint="--write")
    settings = words or []
    written = load_config(run_file, settings, needs_programs=False)
    machine = find_hardware(hardware, host_memory_gib=host_memory_gib)
    loaded, choices = _settled(written, machine, is_here=hardware == THIS)
    today = plan(
        loaded.config,
        in_cluster(machine, hardware, loaded.config),
        folder=loaded.run_file.parent,
        mean_response_tokens=mean_response_tokens,
    )
    today = replace(today, notes=(*map(str, choices), *today.notes))
    if hardware == THIS:
        today = with_experience(today)
    wanted: Preset | None = preset or ("recommended" if write else None)
    proposals: list[Proposal] = []
    if wanted:  # for the whole run also the two that practice asks to see beside today's settings
        shown = {wanted, "recommended", "aggressive"} if GOALS[wanted].blocks is whole_run else {wanted}
        pinned = frozenset(word.partition("=")[0] for word in settings)
        proposals = [propose(today, one, pinned=pinned) for one in GOALS if one in shown]
    chosen = next((proposal for proposal in proposals if proposal.preset == wanted), None)
    traced: Trace | None = None
    if trace:  # takes some seconds, so it prints its progress to stderr
        from hone.assemble.trace import trace_plan

        traced = trace_plan(today, loaded.run_file.parent, lambda what: typer.echo(f"{what} ...", err=True))
    if as_json:
        typer.echo(json.dumps(_as_dict(today, proposals, price, traced), indent=2))
    else:
        show(today, proposals, price, Console())
        if traced is not None:
            _show_trace(traced, Console())
    final = chosen.plan if chosen else today
    fits = final.verdict.level != "does not fit"
    if write is not None and chosen is not None and fits:
        write_run_file(write, written, settings, chosen)
    elif write is not None:
        typer.echo(
            f"{write} is not written: no settings that keep the algorithm fit on {today.inputs.hardware.title}. Take "
            "more devices, a smaller model or shorter responses.",
            err=True,
        )
    if html is not None:
        from hone.plan.page import page

        ordered = sorted(proposals, key=lambda proposal: proposal is not chosen)
        title = f"Plan of {loaded.name} on {today.inputs.hardware.title}"
        write_whole(html, page(today, ordered, title=title))
    if not fits:
        raise typer.Exit(MemoryExhausted.exit_code)


def _settled(loaded: Loaded, machine: Hardware, *, is_here: bool) -> tuple[Loaded, tuple[AutoChoice, ...]]:
    """The run file as `hone train` has it on these devices; elsewhere with all that `hone-rl[gpu]` installs."""
    if is_here:
        return settled_on(loaded, assumed_devices(loaded.config))
    found = FoundDevices(*machine.names, machine.per_node, machine.bfloat16)
    shape = architecture_of(loaded.config, loaded.run_file.parent)
    done = settled(loaded.config, found, installed=frozenset(["ray", "vllm", *COMPILERS]), shape=shape)
    return replace(loaded, config=done.config), done.choices


def _as_dict(today: Plan, proposals: list[Proposal], price: float | None, traced: Trace | None) -> dict[str, Any]:
    found = today.as_dict()
    if traced is not None:
        found["trace"] = traced.as_dict()
    if price is not None:
        found["time"]["cost_of_1000_steps"] = today.time.cost_of_1000_steps(price, today.inputs.topology.num_devices)
    if proposals:
        found["proposals"] = [proposal.as_dict() for proposal in proposals]
        found["beyond"] = beyond(today)
    return found


# ---- printing


def show(today: Plan, proposals: list[Proposal], price: float | None, console: Console) -> None:
    """Print a plan and its proposals."""
    arch, inputs = today.inputs.architecture, today.inputs

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not inputs.is_local:
        say("\n".join(topology_lines(inputs.topology)))
    say(
        f"{arch.model_type}, {arch.total_parameters:,} parameters, {arch.kv_bytes_per_token():,} B of bf16 cache per "
        f"token; {inputs.hardware.title}"
    )
    for ledger in today.ledgers:
        console.print(_table(ledger))
    say(f"{today.verdict.level}: {today.verdict.sentence}")
    for problem in (*today.verdict.problems, *today.notes):
        say(f"  {problem}")
    say(_speed(today, price))
    if proposals:
        _show_proposals(today, proposals, console, say)
    else:
        say("--preset recommended searches for better settings of the same algorithm.")


def _table(ledger: Ledger) -> Table:
    table = Table(
        title=f"{ledger.count} x {ledger.device}, {gib(ledger.capacity_bytes)}: {level_of(ledger)}",
        title_justify="left",
    )
    table.add_column("phase")
    table.add_column("moment")
    table.add_column("peak", justify="right")
    table.add_column("most of it")
    for moment in ledger.phase_peaks():
        largest = ", ".join(f"{term.name} {gib(term.bytes)}" for term in moment.by_size()[:3])
        bold = "bold" if moment is ledger.peak else None
        table.add_row(moment.phase, moment.name, gib(moment.bytes), largest, style=bold)
    return table


def _show_trace(traced: Trace, console: Console) -> None:
    """The plan beside the trace, in bytes of tensors alone."""
    table = Table(title=f"closed form and trace, tensors only ({traced.seconds:.0f} s)", title_justify="left")
    for name in ("devices", "phase", "moment"):
        table.add_column(name)
    for name in ("plan", "trace", "difference"):
        table.add_column(name, justify="right")
    for point in traced.points:
        row = point.device, point.phase, point.moment, gib(point.planned), gib(point.traced)
        table.add_row(*row, f"{100 * point.error:+.1f} %", style="bold" if point.moment == "peak" else None)
    console.print(table)
    for note in traced.notes:
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)


def _speed(today: Plan, price: float | None) -> str:
    time, lengths = today.time, today.inputs.workload.lengths
    split = ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in time.phases.items())
    mean = f"{lengths.mean_response:,.0f} tokens on average" + (" (assumed)" if lengths.is_assumed else "")
    words = (
        f"about {time.step_s:.3g} s a step ({split}), {time.samples_per_s:.3g} samples/s, {time.tokens_per_s:,.0f} "
        f"response tokens/s; memory {percent(today.memory_utilisation)} and compute "
        f"{percent(time.compute_utilisation)} used; responses of {mean}"
    )
    if price is not None:
        words += f"; 1,000 steps cost {time.cost_of_1000_steps(price, today.inputs.topology.num_devices):,.2f}"
    return words


def _show_proposals(today: Plan, proposals: list[Proposal], console: Console, say: Any) -> None:
    from hone.plan.page import comparison

    table = Table(title="the same algorithm, other settings", title_justify="left")
    for name in ("", "today", *(proposal.preset for proposal in proposals)):
        table.add_column(name)
    for label, cells in comparison([today, *(proposal.plan for proposal in proposals)]):
        table.add_row(label, *cells)
    console.print(table)
    for proposal in proposals:
        say(f"{proposal.preset} ({GOALS[proposal.preset].title}): {len(proposal.changes)} changes")
        for change in proposal.changes:
            say(f"  {change.key}: {inline(change.before)} -> {inline(change.after)}  {change.why}")
    for line in beyond(today):
        say(f"would change the algorithm, so not done: {line}")


def write_run_file(path: Path, loaded: Loaded, settings: list[str], chosen: Proposal) -> None:
    """Write a run file that extends the planned one. Where it sets keys of the cluster, `auto` is written out too."""
    lines = [f"# {chosen.preset} settings for {loaded.run_file}, by hone plan on {chosen.plan.inputs.hardware.title}."]
    lines.append(f"extends: [{json.dumps(loaded.run_file.name)}]")
    tree: dict[str, Any] = {}
    for word in settings:
        key, _, value = word.partition("=")
        _put(tree, key, f"{value}  # from the command line")
    if any(change.key.startswith("cluster.") for change in chosen.changes):
        # Other keys of the cluster are refused where a run file leaves open what reads them.
        written, planned = loaded.config.cluster, chosen.plan.inputs.config.cluster
        decided: dict[str, Any] = {}
        if written.backend == "auto":
            decided["cluster.backend"] = planned.backend
        if written.engines.use == "auto":
            decided["cluster.engines.use"] = planned.engines.use
        if planned.pools and not written.pools:
            pools = {name: pool.model_dump(exclude_defaults=True) for name, pool in planned.pools.items()}
            decided["cluster.pools"] = pools
        for key, value in decided.items():
            _put(tree, key, f"{inline(value)}  # what auto stands for on these devices")
    for change in chosen.changes:
        _put(tree, change.key, f"{inline(change.after)}  # was {inline(change.before)}; {change.why}")
    write_whole(path, "\n".join([*lines, *_yaml_lines(tree)]) + "\n")


def _put(tree: dict[str, Any], key: str, line: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = line


def _yaml_lines(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {value}"


def show_comparison(folder: Path, *, as_json: bool) -> None:
    """Print the comparison of a run, finished or not.

    Raises:
        RunFolderError: no run there, or one of a version that measured nothing.
    """
    record, found = comparison(folder)
    run = RunFolder.read(folder)
    noise = noise_advice(run.identity(), metric_lines(run.metrics))
    if as_json:
        phases = [
            {
                "stage": row.stage,
                "phase": row.phase,
                "measured_bytes": row.measured_bytes,
                "planned_bytes": row.expected.bytes if row.expected else None,
                "moment": row.expected.moment if row.expected else None,
            }
            for row in found
        ]
        shown = {
            "format": 1,
            "measured_by": record.what,
            "limit_bytes": record.limit_bytes,
            "phases": phases,
            "changes": [asdict(change) for change in record.changes],
            "gradient_noise": noise.as_dict() if noise else None,
        }
        typer.echo(json.dumps(shown, indent=2))
        return
    for line in table(found, record) or ["no step is finished yet"]:
        typer.echo(line)
    for change in record.changes:
        typer.echo(f"  {change.sentence}")
    for line in noise.lines if noise else ():
        typer.echo(line)
