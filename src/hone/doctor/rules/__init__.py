"""The rules: every pattern with its limit and the limit's source, its causes, and what to change.

The only table of thresholds; `docs/reference/alarms.md` is generated from it. `ours` as a source means: chosen here and
checked against the healthy and faulty runs of `benchmarks/doctor.py` (docs/doctor.md).
"""

from hone.doctor.rule import AlarmRule
from hone.doctor.rules.judge import JUDGES
from hone.doctor.rules.learning import LEARNING
from hone.doctor.rules.liveness import LIVENESS
from hone.doctor.rules.mismatch import MISMATCH
from hone.doctor.rules.policy import POLICY
from hone.doctor.rules.prompts import PROMPTS, RESPONSES
from hone.doctor.rules.reward import CRITIC, REWARDS
from hone.doctor.rules.speed import SPEED
from hone.doctor.rules.tuning import TUNING

RULES: tuple[AlarmRule, ...] = (
    *LIVENESS, *PROMPTS, *RESPONSES, *REWARDS, *MISMATCH, *POLICY, *LEARNING, *CRITIC, *JUDGES, *SPEED, *TUNING,
)  # fmt: skip
NAMES = tuple(rule.name for rule in RULES)
"""Alarm names, which `observe.stop_on` takes."""
