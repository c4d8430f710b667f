"""The checker over events.jsonl: it holds on every real run, killed or not, and catches each planted violation."""

import json

import pytest
from fakes import EarlyBuffer, fake_run, run_virtually
from tiny import write_run

from hone.cli.main import main
from hone.loop import policy
from hone.run.audit import RULES, audit, audit_file


def events_of(max_staleness=1, seed=0, **options):
    run = fake_run(max_staleness, seed=seed, **options)
    run_virtually(policy.train_policy(run))
    return run.observer.events


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_rule_holds_with_slow_engines_and_dropped_groups(max_staleness):
    for seed in range(5):
        found = audit(events_of(max_staleness, seed))
        assert found.violations == () and found.updates == 30 and found.counts["group_dropped"] > 0
        assert (found.in_flight > 0) == (max_staleness > 0)


# A run of two updates of two groups each, on two replicas of which one dies, killed and resumed after the first.
# Compact: kind and fields; the tests below plant one violation each.
STORY = """
started step=0 permits=4 max_staleness=1
replica_up replica=a
replica_up replica=b
published version=0 replica=a fingerprint=x
published version=0 replica=b fingerprint=x
published version=0
group_started prompts=[0]
group_started prompts=[1]
group_started prompts=[2]
group_started prompts=[3]
sampled prompts=[0] stream=train replica=a versions=[0,0]
group_finished prompts=[0] versions=[0,0]
replica_down replica=b why=killed
requeued prompt=1 stream=train replica=b why=killed
sampled prompts=[1] stream=train replica=a versions=[0,0]
group_finished prompts=[1] versions=[0,0]
training step=1
trained step=1 prompts=[0,1] oldest=0
published version=1 replica=a fingerprint=y
published version=1
replica_up replica=b
published version=1 replica=b fingerprint=y
saved step=1
group_started prompts=[4]
group_finished prompts=[2] versions=[0,1]
group_finished prompts=[3] versions=[0,1]
trained step=2 prompts=[2,3] oldest=0
started step=1 permits=4 max_staleness=1
replica_up replica=a
published version=1 replica=a fingerprint=y
published version=1
group_started prompts=[2]
group_started prompts=[3]
group_started prompts=[4]
sampled prompts=[2] stream=train replica=a versions=[1,1]
group_finished prompts=[2] versions=[1,1]
group_dropped prompts=[3]
group_finished prompts=[4] versions=[1,1]
trained step=2 prompts=[2,4] oldest=1
published version=2 replica=a fingerprint=z
published version=2
stopped outcome=finished
"""


def events_in(story):
    for line in filter(None, story.splitlines()):
        kind, *fields = line.split(" ")
        pairs = (field.split("=") for field in fields)
        yield {"kind": kind} | {name: json.loads(v) if v[0] in "-[0123456789" else v for name, v in pairs}


def test_the_story_holds():
    found = audit(events_in(STORY))
    assert found.violations == ()
    assert (found.updates, found.undone, found.in_flight) == (2, 1, 0)
    assert str(found).splitlines()[0] == (
        "2 updates survive, 1 were undone, started 2 times, 0 groups in flight, 1 requeued, 1 replica_down"
    )


PLANTED = {
    "trained again after a resumption that did not undo it": (
        "twice", "trained step=2 prompts=[2,4] oldest=1", "trained step=2 prompts=[0,2,4] oldest=1"),
    "an update is missing": ("steps", "trained step=2 prompts=[2,4]", "trained step=3 prompts=[2,4]"),
    "resumed at a step that was never made": ("steps", "started step=1", "started step=7"),
    "the version of another update is published": (
        "steps", "published version=2\nstopped", "published version=1\nstopped"),
    "a replica samples before it was given weights": (
        "unsynced", "published version=1 replica=b fingerprint=y\n",
        "sampled prompts=[2] stream=train replica=b versions=[0,0]\n"),
    "a replica samples with the version before": (
        "unsynced", "sampled prompts=[2] stream=train replica=a versions=[1,1]",
        "sampled prompts=[2] stream=train replica=a versions=[0,1]"),
    "a dead replica samples": (
        "unsynced", "sampled prompts=[1] stream=train replica=a", "sampled prompts=[1] stream=train replica=b"),
    "a replica nobody knows samples": (
        "unsynced", "sampled prompts=[1] stream=train replica=a", "sampled prompts=[1] stream=train replica=c"),
    "a replica holds other bytes": (
        "unsynced", "published version=1 replica=b fingerprint=y", "published version=1 replica=b fingerprint=q"),
    "a group has tokens of a version that was not published": (
        "unsynced", "group_finished prompts=[4] versions=[1,1]", "group_finished prompts=[4] versions=[1,2]"),
    "a token is too old": ("stale", "trained step=2 prompts=[2,3] oldest=0", "trained step=2 prompts=[2,3] oldest=-1"),
    "a group is passed over": ("lost", "group_dropped prompts=[3]\n", ""),
    "a group is trained that did not finish": ("lost", "group_finished prompts=[4] versions=[1,1]\n", ""),
    "a group is started twice": ("lost", "group_started prompts=[4]\nsampled", "group_started prompts=[2]\nsampled"),
    "a group finishes twice": (
        "lost", "group_dropped prompts=[3]", "group_dropped prompts=[3]\ngroup_finished prompts=[3] versions=[1,1]"),
    "a group is dropped twice": (
        "lost", "group_dropped prompts=[3]", "group_dropped prompts=[3]\ngroup_dropped prompts=[3]"),
    "a group that is not in flight is requeued": (
        "lost", "requeued prompt=1", "requeued prompt=9"),
    "one group too many in flight": (
        "permits", "group_started prompts=[3]\nsampled",
        "group_started prompts=[3]\ngroup_started prompts=[4]\nsampled"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_caught(name):
    rule, before, after = PLANTED[name]
    assert before in STORY
    found = audit(events_in(STORY.replace(before, after, 1)))
    assert rule in {violation.rule for violation in found.violations}, str(found)


def test_each_rule_has_a_planted_violation():
    assert {rule for rule, _, _ in PLANTED.values()} == set(RULES)


def spoiled(events, first, last, what="events"):
    """The same without those from one line to another, which are lost."""
    gap = {"at": 0.0, "kind": "gap", "what": what, "why": "the disk took nothing"}
    return [*events[:first], gap, *events[last:]]


def test_an_end_that_was_lost_is_named_and_breaks_no_rule():
    story = list(events_in(STORY))
    second_start = max(place for place, event in enumerate(story) if event["kind"] == "started")
    for first in range(1, second_start + 1):
        found = audit(spoiled(story, first, second_start))
        assert found.violations == () and found.updates == 2
        assert found.gaps == (f"line {first + 1}: records are missing: the disk took nothing",)
    assert "steps" in {violation.rule for violation in audit(story[:9] + story[second_start:]).violations}


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_gap_anywhere_accuses_no_replica(max_staleness):
    events = events_of(max_staleness, seed=1)
    for first in range(1, len(events), 7):
        for length in (1, 5, 40):
            found = audit(spoiled(events, first, first + length))
            assert found.violations == (), (first, length)
    story = list(events_in(STORY))
    for first in range(len(story)):
        for last in range(first + 1, len(story)):
            assert audit(spoiled(story, first, last)).violations == (), (first, last)


def test_after_a_gap_the_rules_are_held_against_again():
    story = list(events_in(STORY.replace("group_finished prompts=[4] versions=[1,1]\n", "")))
    found = audit(spoiled(story, 2, 10))
    assert {violation.rule for violation in found.violations} == {"lost"}


def test_permits_returned_before_publishing_are_caught(monkeypatch):
    monkeypatch.setattr(policy, "GroupBuffer", EarlyBuffer)
    rules = set()
    for seed in range(5):
        run = fake_run(1, seed=seed)
        run_virtually(policy.train_policy(run))
        rules |= {violation.rule for violation in audit(run.observer.events).violations}
    assert rules == {"permits", "stale"}


@pytest.mark.parametrize(
    "overrides",
    [pytest.param([], marks=pytest.mark.slow("a run more")), ["rollout.max_staleness=1"]],
    ids=["synchronous", "asynchronous"],
)
def test_it_holds_on_a_real_run_that_is_gone_on_with(tmp_path, overrides):
    run_file = str(write_run(tmp_path, steps=4))
    assert main(["train", run_file, *overrides]) == 0
    assert main(["train", run_file, "--resume", "run.steps=6", *overrides]) == 0
    found = audit_file(tmp_path / "run" / "events.jsonl")
    assert found.violations == () and found.updates == 6 and found.counts["started"] == 2
    assert found.counts["saved"] >= 6 and found.counts["stopped"] == 2
