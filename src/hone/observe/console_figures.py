"""What the console shows of a run: its state, as one line of text or as panels of the live view."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Group as Stack
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hone.observe.metrics import PHASES
from hone.types import Group

BARS = "▁▂▃▄▅▆▇█"

MAX_WIDTH = 110

SHOWN_SAMPLES = 4
"""Of the group in the live view: the best, the worst, and some between them."""
PHASE_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_black")
"""One per phase of the time split, then one for the rest."""
HEADLINE = {
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "accuracy",
    "eval/accuracy": "eval accuracy",
    "sft/loss": "loss",
    "rollout/response_tokens_mean": "tokens per response",
    "train/kl_ref": "KL to reference",
    "train/entropy": "entropy",
    "train/clip_frac": "clipped",
    "train/grad_norm": "gradient norm",
    "rollout/zero_std_group_frac": "groups without signal",
    "rollout/tokens_per_s": "tokens/s",
    "sft/tokens_per_s": "tokens/s",
    "memory/rss_gib": "memory, GiB",
    "memory/device_frac": "memory used",
    "memory/device_busy_frac": "device busy",
    "memory/rungs": "settings lowered",
}
"""Metric -> its label, in the order shown. `train/clip_frac` is the sum of both sides."""
CHARTED = ("sft/loss", "rollout/reward_mean", "rollout/accuracy", "eval/accuracy")
"""Drawn as a line of bars over the whole stage."""
PLAIN_LABELS = {
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "acc",
    "eval/accuracy": "eval",
    "sft/loss": "loss",
    "rollout/response_tokens_mean": "len",
    "train/kl_ref": "kl",
    "train/entropy": "ent",
    "train/clip_frac": "clip",
    "rollout/tokens_per_s": "tok/s",
    "sft/tokens_per_s": "tok/s",
}


class ConsoleState:
    """Current state of a run: latest value of each metric, history for charts, speed."""

    def __init__(self, title: str, total_steps: int) -> None:
        self.title, self.total_steps = title, total_steps
        self.stage, self.step = "", 0
        self.values: dict[str, float] = {}
        self.step_times: dict[str, float] = {}
        """`time/` values of the last line of a step; an evaluation's line has times of its own."""
        self.history: dict[str, list[float]] = {}
        """Headline metric -> all its finite values in this stage."""
        self.group: Group | None = None
        """A group of the last step."""
        self.began_s = time.perf_counter()
        self._paces: deque[tuple[float, int]] = deque(maxlen=50)

    def begin(self, stage: str, total_steps: int) -> None:
        self.stage, self.total_steps, self.step = stage, total_steps, 0
        self.values.clear()
        self.step_times.clear()
        self.history.clear()
        self._paces.clear()
        self.group = None

    def update(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        if stage != self.stage:
            self.begin(stage, self.total_steps)
        self.step = step
        if "time/step_s" in values:
            self.step_times = {name: value for name, value in values.items() if name.startswith("time/")}
        self.values.update(values)
        if "train/clip_low_frac" in values:
            self.values["train/clip_frac"] = values["train/clip_low_frac"] + values.get("train/clip_high_frac", 0.0)
        for name in CHARTED:
            if name in values and math.isfinite(values[name]):
                self.history.setdefault(name, []).append(values[name])
        self._paces.append((time.perf_counter(), step))

    @property
    def remaining_s(self) -> float | None:
        """From the speed of the last steps; None before the first."""
        if len(self._paces) < 2 or self._paces[-1][1] == self._paces[0][1]:
            return None
        (then, first), (now, last) = self._paces[0], self._paces[-1]
        return max(0, self.total_steps - last) * (now - then) / (last - first)


def plain_line(state: ConsoleState) -> str:
    """`rl 120/300  reward 0.412  acc 0.398  len 3.5  kl 0.012  tok/s 12.4k  ETA 0:41`, present metrics only."""
    shown = [f"{label} {number(state.values[name])}" for name, label in PLAIN_LABELS.items() if name in state.values]
    if memory := engine_memory(state.values):
        shown.append(max(memory.values(), key=lambda found: found[0])[1])
    if state.remaining_s:
        shown.append(f"ETA {duration(state.remaining_s)}")
    return "  ".join([f"{state.stage} {state.step}/{state.total_steps}", *shown])


def engine_memory(values: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Of each engine on an accelerator: used share of its device, and `41.2/79.6 GiB, cache 71%, prefix hits 63%`."""
    found: dict[str, tuple[float, str]] = {}
    for room in values:
        name = room.removeprefix("memory/").removesuffix("_cache_room_tokens")
        used, total = (values.get(f"memory/{name}_device_{which}_gib") for which in ("used", "total"))
        if room != f"memory/{name}_cache_room_tokens" or used is None or not total:
            continue
        words = [f"{used:.1f}/{total:.1f} GiB"]
        if values[room]:
            words.append(f"cache {values.get(f'memory/{name}_cache_tokens', 0.0) / values[room]:.0%}")
        if (hits := values.get(f"engine/{name}_prefix_hit_frac")) is not None:
            words.append(f"prefix hits {hits:.0%}")
        found[name] = (used / total, ", ".join(words))
    return found


def render(state: ConsoleState, messages: list[Text], *, width: int) -> Panel:
    """The live view as one renderable, of the height its content needs."""
    inner = min(width, MAX_WIDTH) - 4
    parts = [_charts(state, inner), Text(), _figures(state)]
    parts += [Text(f"{name}  {words}", style="dim") for name, (_, words) in engine_memory(state.values).items()]
    if split := _time_split(state, inner):
        parts += [Text(), *split]
    if messages:
        parts += [Text(), *messages]
    if state.group is not None:
        parts += [Text(), *_samples(state.group, inner)]
    parts += [Text(), _progress(state, inner)]
    title = Text.assemble((" hone ", "bold reverse"), " ", (state.title, "bold"), " ")
    return Panel(Stack(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1), width=inner + 4)


def _progress(state: ConsoleState, width: int) -> Table:
    done = state.step / max(1, state.total_steps)
    left = "" if state.remaining_s is None else f"{duration(state.remaining_s)} left"
    bar_width = max(10, width - 46)
    full = round(bar_width * min(1.0, done))
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(f"{state.stage} {state.step}/{state.total_steps}", style="bold"),
        Text.assemble(("━" * full, "green"), ("━" * (bar_width - full), "bright_black")),
        Text(f"{duration(time.perf_counter() - state.began_s)} elapsed"),
        Text(left, style="cyan"),
    )
    return row


def _charts(state: ConsoleState, width: int) -> Table:
    """A line of bars per headline series, scaled to its own range."""
    grid = Table.grid(padding=(0, 2))
    for name in CHARTED:
        if not (series := state.history.get(name)):
            continue
        low, high = min(series), max(series)
        grid.add_row(
            Text(HEADLINE[name], style="dim"),
            Text(bars(series, width - 44), style="green"),
            Text(number(state.values[name]), style="bold"),
            Text(f"{number(low)} … {number(high)}", style="dim"),
        )
    return grid


def _figures(state: ConsoleState) -> Table:
    """The other current values, three to a row."""
    shown = [name for name in HEADLINE if name in state.values and name not in state.history]
    grid = Table.grid(padding=(0, 2))
    for start in range(0, len(shown), 3):
        cells: list[Text] = []
        for name in shown[start : start + 3]:
            cells += [
                Text(HEADLINE[name], style="dim"),
                Text(number(state.values[name]), style="bold", justify="right"),
            ]
        grid.add_row(*cells)
    return grid


def _time_split(state: ConsoleState, width: int) -> list[Text]:
    """One bar of the last step's seconds by phase, and its legend."""
    seconds = {phase: state.step_times.get(f"time/{phase}_s", 0.0) for phase in PHASES}
    if not any(seconds.values()):
        return []
    total = max(sum(seconds.values()), state.step_times.get("time/step_s", 0.0))
    seconds["other"] = total - sum(seconds.values())
    bar, legend = Text(), Text()
    for (phase, spent), color in zip(seconds.items(), PHASE_COLORS, strict=True):
        if spent > 0:
            bar.append("█" * round(width * spent / total), style=color)
        if spent >= 0.005 * total:
            legend.append("■ ", style=color)
            legend.append(f"{phase} {spent / total:.0%}   ")
    bar.truncate(width)
    return [bar, legend]


def _samples(group: Group, width: int) -> list[Text]:
    """The end of the prompt, and some samples, the best first: reward, number of tokens, and as much text as fits."""
    prompt = _one_line(group.prompt.text[-4 * width :])
    lines = [Text("…" + prompt[1 - width :] if len(prompt) > width else prompt, style="dim")]
    order = sorted(range(len(group.samples)), key=lambda i: _reward(group, i), reverse=True)
    shown = min(SHOWN_SAMPLES, len(order))
    for place in range(shown):
        i = order[place * (len(order) - 1) // max(1, shown - 1)]
        reward, sample = _reward(group, i), group.samples[i]
        said = "no score" if reward == -math.inf else number(reward)
        size = f"  {len(sample.token_ids):>6} tokens  "
        line = Text.assemble((f"{said:>8}", "bold"), (size, "dim"), _one_line(sample.text[: 4 * width]))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _reward(group: Group, index: int) -> float:
    """A sample's reward; one without comes after all that have one."""
    reward = group.rewards[index] if group.rewards else None
    return -math.inf if reward is None else reward


def spread(group: Group) -> float:
    """How far apart the rewards of a group lie."""
    rewards = group.known_rewards
    return max(rewards) - min(rewards) if rewards else -1.0


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def bars(values: Sequence[float], width: int) -> str:
    """The series as block characters from its minimum to its maximum, at most `width` of them: means of equal bins."""
    size = max(1, math.ceil(len(values) / max(1, width)))
    means = [sum(part) / len(part) for i in range(0, len(values), size) if (part := values[i : i + size])]
    low, high = min(means), max(means)
    spread = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / spread * (len(BARS) - 1))] for mean in means)


def number(value: float) -> str:
    """Three significant digits, as people write them: 0.412, 12.4k, 3.1e-06."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
