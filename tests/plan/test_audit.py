"""The audit reaches planner.md's verdicts on practices A, C and E from settings and claims alone."""

from pathlib import Path

import pytest

from hone.errors import ConfigError
from hone.plan.audit.report import audit

RECIPES = Path(__file__).parents[2] / "examples" / "audit"


@pytest.fixture(scope="module")
def findings():
    """A function: recipe, rule -> its findings."""
    found = {path.stem: audit(path) for path in RECIPES.glob("*.yaml")}

    def of(recipe: str, rule: str):
        return [finding for finding in found[recipe].findings if finding.rule == rule]

    return of


# ---- practice A: a judge of 16 B beside the trainer


def test_a_judge_of_16b_does_not_fit_in_0_3_of_80_gb(findings):
    """23.7 GiB are less than 29.26 GiB of weights; two devices each would do, or 0.45 of one."""
    (finding,) = findings("practice-a", "engine_has_room")
    assert finding.kind == "impossible"
    assert finding.values["requested_gib"] == pytest.approx(23.7, abs=0.05)
    assert finding.values["weights_gib"] == pytest.approx(29.26, abs=0.005)
    assert 0.41 < finding.values["smallest_frac"] <= 0.45
    assert finding.values["works_with_tensor_parallel_doubled"]
    held = [finding.values[f"sequences_at_{frac}"] for frac in ("0.45", "0.5", "0.6")]
    assert held == sorted(held) and 1 <= held[0] < 6 and 20 < held[2] < 30


def test_a_weights_are_32_gb_and_16_on_each_of_two(findings):
    one, two = findings("practice-a", "weights")
    assert (one.kind, two.kind) == ("right", "right")
    assert one.values["parameters"] == 15_706_484_224
    assert one.values["gib"] == pytest.approx(29.26, abs=0.005)


def test_a_two_cards_of_40_gb_are_enough(findings):
    (finding,) = findings("practice-a", "fits")
    assert finding.kind == "right"


def test_a_5_to_10_gb_of_cache_hold_few_sequences(findings):
    """7.6 to 15 of 21k tokens; 128 would need 78 GiB; tensor parallelism does not divide a latent."""
    (finding,) = findings("practice-a", "kv_cache")
    assert finding.kind == "wrong"
    assert finding.values["holds_low"] == pytest.approx(7.6, abs=0.05)
    assert finding.values["holds_high"] == pytest.approx(15, abs=0.3)
    assert finding.values["each_gib"] == pytest.approx(0.61, abs=0.005)
    assert finding.values["needed_gib"] == pytest.approx(78, abs=0.5)
    assert finding.values["bytes_per_token_with_2_devices"] == 31_104


def test_a_what_the_engines_leave_is_less_than_an_update_takes(findings):
    """0.4 + 0.3 leaves 23.7 GiB for a trainer of 11.4 idle and 22 to 47 in an update."""
    (finding,) = findings("practice-a", "shares_left")
    assert finding.kind == "wrong"
    assert finding.values["left_gib"] == pytest.approx(23.7, abs=0.05)
    assert finding.values["idle_gib"] == pytest.approx(11.4, abs=0.05)
    assert finding.values["update_low_gib"] == pytest.approx(22.3, abs=0.1)
    assert finding.values["update_high_gib"] == pytest.approx(46.9, abs=0.1)


def test_a_50000_batched_tokens_cost_gib_and_are_not_needed(findings):
    (finding,) = findings("practice-a", "workspace_is_worth_it")
    assert finding.kind == "wasteful" and finding.values["lost_gib"] > 2


def test_a_lowering_the_share_makes_a_full_cache_worse(findings):
    (finding,) = findings("practice-a", "out_of_memory_order")
    assert finding.kind == "wrong" and finding.values["sequences_lost"] > 0


def test_a_lengths_overflow(findings):
    (finding,) = findings("practice-a", "lengths_fit")
    assert finding.kind == "contradictory"
    assert finding.values == {"needed": 17_524, "allowed": 17_000}


# ---- practice C: placements that wait for ever


def test_c_roles_in_two_groups_ask_for_a_second_set_of_devices(findings):
    (finding,) = findings("practice-c-colocated", "placement_can_start")
    assert finding.kind == "impossible"
    assert finding.values == {"asked": 16, "devices": 8}


def test_c_the_48_gpu_recipe_asks_for_64(findings):
    (finding,) = findings("practice-c-split", "placement_can_start")
    assert finding.kind == "impossible"
    assert finding.values == {"asked": 64, "devices": 48}


# ---- practice E: nanochat at 8 % of a card


def test_e_cache_is_256_mib_and_there_is_one(findings):
    (one,), (several,) = findings("practice-e", "kv_cache"), findings("practice-e", "kv_cache_batches")
    assert one.kind == "wrong" and one.values["mib"] == 256
    assert several.kind == "wrong" and several.values["one_mib"] == 256


def test_e_activations_are_the_floor_of_checkpointing(findings):
    """35 to 44 times too low, by vocabulary."""
    (finding,) = findings("practice-e", "activations")
    assert finding.kind == "wrong"
    assert finding.values["floor_gib"] == 0.125
    assert finding.values["true_gib"] == pytest.approx(4.43, rel=0.01)
    assert finding.values["times"] == pytest.approx(35.4, rel=0.01)
    (passes,) = findings("practice-e", "activations_of_passes")
    assert passes.kind == "wrong" and passes.values["passes_at_once"] == 1


def test_e_gradients_are_left_out(findings):
    (finding,) = findings("practice-e", "static")
    assert finding.kind == "wrong" and "gradients are left out" in finding.text
    assert finding.values["weights_gib"] == pytest.approx(1.44, abs=0.005)
    assert finding.values["gradients_gib"] == pytest.approx(1.44, abs=0.005)
    assert finding.values["optimizer_gib"] == pytest.approx(2.1, abs=0.05)


def test_e_totals_grow_by_2_5_gib_and_not_by_4_to_8_times(findings):
    found = findings("practice-e", "total")
    assert [round(finding.values["gib"], 1) for finding in found] == [7.9, 10.4, 12.9]
    assert [finding.kind for finding in found] == ["wrong", "right", "wrong"]
    assert all(finding.values["four_more_gib"] == pytest.approx(2.5, abs=0.05) for finding in found)
    assert found[0].values["times_with_four_more"] < 1.4


def test_e_with_the_larger_vocabulary(tmp_path):
    """The traced figures of 65,536: 11.8, 15.3 and 18.7 GiB, weights 2.13, optimizer 3.5, saved 5.49."""
    text = (RECIPES / "practice-e.yaml").read_text().replace("vocab_size: 32768", "vocab_size: 65536")
    (tmp_path / "e.yaml").write_text(text)
    found = audit(tmp_path / "e.yaml").findings
    totals = [finding.values["gib"] for finding in found if finding.rule == "total"]
    assert totals == pytest.approx([11.8, 15.3, 18.7], abs=0.06)
    (static,) = (finding for finding in found if finding.rule == "static")
    assert static.values["weights_gib"] == pytest.approx(2.13, abs=0.01)
    assert static.values["optimizer_gib"] == pytest.approx(3.5, abs=0.01)
    (kept,) = (finding for finding in found if finding.rule == "activations")
    assert kept.values["true_gib"] == pytest.approx(5.49, rel=0.01)
    assert kept.values["times"] == pytest.approx(44, abs=0.3)


def test_e_samples_and_prompts_take_no_memory_and_change_the_algorithm(findings):
    samples, prompts = findings("practice-e", "grows_with")
    assert (samples.kind, prompts.kind) == ("no effect", "no effect")
    assert (prompts.values["updates_before"], prompts.values["updates_after"]) == (233, 116)


def test_e_shares_of_the_card_are_smaller_than_said(findings):
    low, high = findings("practice-e", "utilisation")
    assert (low.kind, high.kind) == ("wrong", "wrong")
    assert [round(value) for value in low.values.values()] == [31, 47]
    assert [round(value) for value in high.values.values()] == [56, 78]


def test_e_its_own_way_down_breaks_its_own_rule(findings):
    (finding,) = findings("practice-e", "out_of_memory_step")
    assert finding.kind == "contradictory"
    assert finding.values == {"kept": 30, "nearest": 4}


def test_e_divisibility_rules_are_right_in_intent(tmp_path):
    """Samples that do not divide are dropped silently, prompts that do not divide end the run."""
    text = (RECIPES / "practice-e.yaml").read_text()
    text = text.replace("device_batch: 8\n", "device_batch: 6\n  devices: 5\n")
    (tmp_path / "e.yaml").write_text(text)
    found = [finding for finding in audit(tmp_path / "e.yaml").findings if finding.rule == "samples_divide"]
    assert [finding.kind for finding in found] == ["contradictory", "impossible"]
    assert found[0].values == {"kept": 30, "asked": 32}


# ---- the file


def test_findings_come_with_their_line(findings):
    found = audit(RECIPES / "practice-e.yaml")
    text = (RECIPES / "practice-e.yaml").read_text().splitlines()
    line = next(number for number, words in enumerate(text, 1) if "out_of_memory_step" in words)
    assert any(words.startswith(f"{RECIPES / 'practice-e.yaml'}:{line}  contradictory") for words in found.lines())
    assert not found.is_sound


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nam: x", r"recipe.yaml:3  nam: extra inputs"),
        ("claims: [{about: weather}]", r"recipe.yaml:3  claims.0.about: input should be"),
        ("claims: [{about: weights, gb: 1}]", "must name an engine"),
    ],
)
def test_what_is_no_recipe_says_where(tmp_path, line, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"name: x\nhardware: T4\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        audit(file)
