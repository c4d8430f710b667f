import io
import re

import pytest
from observed import make_group
from rich.console import Console
from rich.text import Text

from hone.observe import console
from hone.observe.console import LiveView, PlainView, QuietView, open_view
from hone.observe.console_figures import ConsoleState, bars, duration, engine_memory, number, plain_line, render

STEP = {
    "rollout/reward_mean": 0.4123,
    "rollout/accuracy": 0.4,
    "train/kl_ref": 0.012,
    "train/clip_low_frac": 0.01,
    "train/clip_high_frac": 0.02,
    "rollout/tokens_per_s": 12345.0,
    "time/step_s": 2.0,
    "time/generate_s": 1.0,
    "time/train_s": 0.5,
}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    return now


def test_plain_shows_the_first_and_the_last_and_one_line_in_two_seconds_between(clock):
    stream = io.StringIO()
    view = PlainView("title", 100, stream)
    for step in range(1, 101):
        view.update("rl", step, STEP)
        clock[0] += 0.125
    view.close("done")
    lines = stream.getvalue().splitlines()
    shown = [int(line.split()[1].split("/")[0]) for line in lines[:-1]]
    assert shown == [1, 17, 33, 49, 65, 81, 97, 100]
    assert lines[1] == "rl 17/100  reward 0.412  acc 0.4  kl 0.012  clip 0.03  tok/s 12.3k  ETA 0:10"
    assert lines[-1] == "done"


def test_plain_prints_nothing_twice(clock):
    stream = io.StringIO()
    view = PlainView("title", 1, stream)
    view.update("rl", 1, STEP)
    view.close("done")
    assert len(stream.getvalue().splitlines()) == 2


def test_plain_never_prints_control_characters():
    stream = io.StringIO()
    view = PlainView("title", 2, stream)
    view.say("a\x1b[31mred\r\nsecond\tline\x07")
    view.warn("careful")
    view.update("rl", 1, STEP)
    assert stream.getvalue().startswith("a [31mred\nsecond line \nwarning: careful\nrl 1/2")
    assert all(c.isprintable() for line in stream.getvalue().split("\n") for c in line)


def test_each_stage_begins_with_a_line(clock):
    stream = io.StringIO()
    view = PlainView("title", 100, stream)
    view.begin("sft", 10)
    view.update("sft", 1, {"sft/loss": 2.0})
    view.update("sft", 2, {"sft/loss": 1.0})
    view.begin("rl", 20)
    view.update("rl", 1, STEP)
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["sft 1/10", "sft 2/10", "rl 1/20"]


def test_quiet_shows_warnings_only(capsys):
    view = QuietView()
    view.say("hello")
    view.update("rl", 1, STEP)
    view.warn("disk full")
    view.close("done")
    assert capsys.readouterr() == ("", "warning: disk full\n")


def test_auto_is_plain_where_there_is_no_terminal(capsys):
    assert isinstance(open_view("auto", "t", 1), PlainView)
    assert isinstance(open_view("quiet", "t", 1), QuietView)


def drawn(state, messages=(), **options):
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False, **options)
    screen.print(render(state, list(messages), width=100))
    return screen.file.getvalue()


def test_the_live_view_shows_every_headline(clock):
    state = ConsoleState("my run", 40)
    state.begin("rl", 40)
    for step in range(1, 11):
        state.update("rl", step, {**STEP, "rollout/reward_mean": step / 10})
        clock[0] += 2.0
    state.update("rl", 10, {"eval/accuracy": 0.75, "time/evaluate_s": 9.0})
    text = drawn(state, [Text("checkpoint written")], no_color=True, color_system=None)
    for part in (
        "my run",
        "rl 10/40",
        "0:20 elapsed",
        "1:07 left",  # 10 steps and an evaluation took 20 s after the first
        "reward",
        "▁▂▃▃▄▅▆▆▇█",
        "eval accuracy",
        "0.75",
        "KL to reference",
        "12.3k",
        "generate 50%",
        "train 25%",
        "other 25%",
        "checkpoint written",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_engines_on_accelerators_show_their_memory():
    state = ConsoleState("run", 10)
    device = {"memory/engine-0_device_used_gib": 41.25, "memory/engine-0_device_total_gib": 79.6}
    cache = {"memory/engine-0_cache_tokens": 71.0, "memory/engine-0_cache_room_tokens": 100.0}
    other = {name.replace("-0", "-1"): value for name, value in (device | cache).items()}
    other["memory/engine-1_device_used_gib"] = 60.0
    state.update("rl", 1, cache | {"rollout/reward_mean": 0.5})
    assert "GiB" not in plain_line(state), "on a CPU there is no device to tell of"
    state.update("rl", 2, device | cache | other | {"engine/engine-0_prefix_hit_frac": 0.634})
    assert {name: words for name, (_, words) in engine_memory(state.values).items()} == {
        "engine-0": "41.2/79.6 GiB, cache 71%, prefix hits 63%",
        "engine-1": "60.0/79.6 GiB, cache 71%",
    }
    assert plain_line(state).endswith("60.0/79.6 GiB, cache 71%") or "60.0/79.6 GiB, cache 71%  ETA" in plain_line(
        state
    )
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(render(state, [], width=100))
    assert "engine-0  41.2/79.6 GiB, cache 71%, prefix hits 63%" in shown.export_text()


def test_a_group_with_its_rewards_stands_above_the_progress(clock):
    screen = io.StringIO()
    view = LiveView("my run", 40, Console(file=screen, width=100, force_terminal=True, color_system=None))
    view.update("rl", 3, STEP)
    texts = ("right\x1b[2J answer", "so so", "wrong " * 50, "no idea")
    alike = make_group(texts=("a", "b"), rewards=(1.0, 1.0))
    view.show([alike, make_group(texts=texts, rewards=(0.5, 1.0, 0.0, None)), alike])
    lines = drawn(view._state, no_color=True, color_system=None).splitlines()
    first = next(number for number, line in enumerate(lines) if "2+2=" in line)
    shown = [("1 ", "so so"), ("0.5 ", "right [2J answer"), ("0 ", "wrong wrong"), ("no score", "no idea")]
    for line, words in zip(lines[first + 1 : first + 5], shown, strict=True):
        assert all(word in line for word in words)
    assert "rl 3/40" in lines[first + 6] and len(lines) == first + 8
    assert max(map(len, lines)) <= 100
    view.close("done")
    assert "so so" not in screen.getvalue().rsplit("my run", 1)[1]


def test_no_color_is_respected(monkeypatch):
    state = ConsoleState("t", 1)
    state.update("rl", 1, STEP)
    assert "\x1b[3" in drawn(state, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in drawn(state, color_system="standard")


def test_the_live_view_draws_on_its_own_and_leaves_the_last_figures():
    screen = Console(file=io.StringIO(), width=90, force_terminal=True, color_system=None)
    view = LiveView("my run", 2, screen)
    view.begin("rl", 2)
    view.update("rl", 2, STEP)
    view.say("[bold]not markup[/bold]")
    view.warn("careful")
    view.close("done: [1]")
    text = screen.file.getvalue()
    assert "rl 2/2" in text and "[bold]not markup[/bold]" in text and "warning: careful" in text
    assert text.rstrip().endswith("done: [1]")


def test_at_the_end_every_line_since_the_last_figures_stays_on_the_screen():
    screen = Console(file=io.StringIO(), width=90, height=30, force_terminal=True, color_system=None)
    view = LiveView("my run", 2, screen)
    view.begin("rl", 2)
    for when in ("before", "after"):
        for count in range(9):
            view.say(f"{when} {count}")
        if when == "before":
            view.update("rl", 2, STEP)
    view.close("done")
    last = screen.file.getvalue().rpartition("╭")[2]
    assert re.findall(r"(?:before|after) \d", last) == [f"after {count}" for count in range(9)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41234, "0.412"),
        (12345, "12.3k"),
        (3.1e-6, "3.1e-06"),
        (1234, "1234"),
        (2.5e7, "25M"),
        (0, "0"),
        (-3.14159, "-3.14"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_durations_and_bars():
    assert [duration(s) for s in (0.4, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]
    assert bars([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert bars([0, 0, 7, 7], 2) == "▁█"
    assert bars([3.0], 8) == "▁"
    assert len(bars(list(range(1000)), 50)) == 50
