"""`hone eval-judge`: evaluation of a run file's judge on preference pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from hone.config.load import Loaded
from hone.config.run import RewardComponent
from hone.errors import ConfigError
from hone.reward.judge.evaluate import Figures, evaluate_judge, read_pairs
from hone.reward.judge.scorer import JudgeReward
from hone.reward.resolve import Unusable
from hone.reward.rewards import component_name


def evaluate_judge_of(loaded: Loaded, pairs: Path, *, name: str | None, url: str | None) -> Mapping[str, float]:
    """Figures of one judge.

    Args:
        name: of the component, where the file has several judges.
        url: ask there instead of where the component's args say.
    Raises:
        ConfigError: no such judge, or its args do not fit.
        DataError: rows that are no pairs.
    """
    component = _judge(loaded, name)
    args = dict(component.args)
    if url is not None:
        args.pop("service", None)
        args["url"] = url
    rows = read_pairs(pairs)
    try:
        judge = JudgeReward.from_args(args, folder=loaded.run_file.parent, timeout_s=component.timeout_s)
    except Unusable as error:
        raise ConfigError([f"{loaded.run_file}: {component_name(component)}: {error}"]) from error

    async def run() -> Figures:
        try:
            problems = await judge.start()
            if problems:
                raise ConfigError(problems)
            return await evaluate_judge(judge, rows)
        finally:
            await judge.close()

    return asyncio.run(run()).metrics()


def _judge(loaded: Loaded, name: str | None) -> RewardComponent:
    judges = {component_name(c): c for c in loaded.config.reward.components if c.use == "judge"}
    if name is None and len(judges) == 1:
        return next(iter(judges.values()))
    if name is None or name not in judges:
        known = f"its judges: {', '.join(judges)}; choose one with --name" if judges else "it has none (`use: judge`)"
        raise ConfigError([f"{loaded.run_file}: which judge? {known}."])
    return judges[name]
