"""The reward service over real HTTP: its own protocol, the same scores as in process, other systems' clients."""

import asyncio
import gzip
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served import POSTER, poster_text, serving, wait_for

from hone.config.load import load_config
from hone.errors import RewardError
from hone.reward.rewards import Rewards
from hone.reward.verl_client import compute_score
from hone.reward.wire import RewardReply, RewardRequest, items_of, score_of
from hone.types import Group, Prompt, Sample, VersionSpan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as running:
        yield running


def group_of(*texts, answer="4", prompt_id="p", columns=None) -> Group:
    samples = tuple(
        Sample(
            prompt_id, number, tuple(range(len(text))), (-0.5,) * len(text), (VersionSpan(0, len(text)),), "stop", text
        )
        for number, text in enumerate(texts)
    )
    return Group(Prompt(prompt_id, 0, "2+2=", (1, 2), answer=answer, columns=columns or {}), samples)


# ---- /v1/rewards


def test_a_batch_is_answered_item_by_item_in_order(served):
    items = [
        {"id": "right", "solution_str": "4", "ground_truth": "4"},
        {"id": "wrong", "solution_str": "five or six", "ground_truth": "4", "finish_reason": "length"},
        {"id": "no answer", "solution_str": "4"},
    ]
    response = served.post("/v1/rewards", {"items": items})
    reply = RewardReply.to(RewardRequest.model_validate({"items": items}).items, response.json())
    right, wrong, unusable = reply.results
    assert (right.score, wrong.score, unusable.score) == (1 + 0.25 * 1, 0 + 0.25 * 3, None)
    assert right.components["words"].score == 1.0 and right.components["words"].weight == 0.25
    assert wrong.flags == ["truncated"]
    assert unusable.error.model_dump() == {
        "fault": "data",
        "retryable": False,
        "component": "exact",
        "detail": "the row has no answer",
    }
    assert (right.min, right.max) == (0.0, 1 + 0.25 * 8)
    assert reply.summary.model_dump() == {"n": 3, "ok": 2, "error": 1}
    assert right.metrics.keys() == wrong.metrics.keys() == unusable.metrics.keys() >= {"words_tokens"}


def test_a_component_alone_has_its_own_score_and_range(served):
    (result,) = served.score({"solution_str": "a b c"}, reward="words")
    assert (result["score"], result["min"], result["max"], list(result["components"])) == (3.0, 0.0, 8.0, ["words"])


def test_groupwise_items_are_scored_together_and_pointwise_ones_alone(served):
    items = [{"group_id": "g", "solution_str": text} for text in ("a", "bb", "ccc")]
    together = served.score(*items, {"group_id": "h", "solution_str": "bb"}, mode="groupwise", reward="place")
    assert [result["score"] for result in together] == [0.0, 1.0, 2.0, 0.0]
    assert [result["score"] for result in served.score(*items, reward="place")] == [0.0, 0.0, 0.0]


def test_a_reward_sees_length_of_the_response_with_or_without_its_tokens(served):
    with_ids, with_count = served.score(
        {"solution_str": "a", "response_token_ids": [5, 6, 7]},
        {"solution_str": "b", "response_tokens": 9},
        reward="words",
    )
    assert (with_ids["metrics"]["words_tokens"], with_count["metrics"]["words_tokens"]) == (3.0, 9.0)


def test_a_response_beyond_the_limit_earns_the_declared_minimum_and_its_siblings_their_own_scores(served):
    long = "a " * (200 << 10)  # of 256 KiB
    items = [{"group_id": "g", "solution_str": text} for text in ("a b", long, "c")]
    for mode in ("pointwise", "groupwise"):
        results = served.score(*items, mode=mode, reward="words")
        assert [result["score"] for result in results] == [2.0, 0.0, 1.0]
        assert results[1]["flags"] == ["model_fault"] and "256 KiB" in results[1]["components"]["words"]["detail"]
    (undeclared,) = served.score(items[1], reward="place")
    assert (undeclared["score"], undeclared["error"]["fault"]) == (None, "data")


@pytest.mark.parametrize("text", ["a" * (3 << 20), "\ud800語" * (1 << 20)], ids=["ascii", "wide"])
def test_hone_sends_no_more_of_a_response_than_shows_that_it_is_too_long(served, text):
    group = group_of("4", answer="4")
    count = 1 << 18
    tokens = {"token_ids": [7] * count, "sampler_logprobs": [0.0] * count, "versions": (VersionSpan(0, count),)}
    group = replace(group, samples=(replace(group.samples[0], text=text, **tokens),))
    body = RewardRequest(reward="words", items=items_of(group)).model_dump(mode="json")
    (result,) = RewardReply.model_validate(served.post("/v1/rewards", body).json()).results
    assert (result.score, result.flags) == (0.0, ["model_fault"])


def test_no_items_no_results(served):
    assert served.score() == []


def test_a_gzipped_body_is_read(served):
    body = gzip.compress(json.dumps({"items": [{"id": "a", "solution_str": "4", "ground_truth": "4"}]}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert served.client.post("/v1/rewards", content=body, headers=headers).json()["summary"]["ok"] == 1


def test_half_a_surrogate_pair_spoils_neither_item_nor_batch(served):
    body = b'{"reward": "words", "items": [{"id": "a", "solution_str": "\\ud800 x"}, {"id": "b", "solution_str": "y"}]}'
    response = served.client.post("/v1/rewards", content=body, headers={"Content-Type": "application/json"})
    assert [result["score"] for result in response.json()["results"]] == [2.0, 1.0]


# ---- the same scores as in process, to the last bit


GROUPS = [
    ("exact", group_of("4", " 4 ", "5", "", answer="4")),
    ("exact", group_of("4", answer=None)),
    ("gsm8k", group_of("so #### 1,234", "#### 1234.00", "1234", "#### 7", answer="10 + 1224 #### 1234")),
    ("words", group_of("one two", "", "a b c d e f g h i j", answer={"any": ["thing", 0.1]})),
    (
        "poster",
        group_of(
            poster_text(), poster_text(x=37.3, y=1e-3), poster_text(text="Spring sail"), "no poster", answer=POSTER
        ),
    ),
    ("poster", group_of("whatever", answer="{")),
    ("place", group_of("a", "bbb", "cc")),
]


@pytest.mark.parametrize(("name", "group"), GROUPS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(GROUPS)])
def test_served_equals_in_process(served, folder, name, group):
    async def in_process():
        section = load_config(folder / "rewards.yaml", needed="reward").config.reward
        alone = tuple(c for c in section.components if c.use.rpartition(":")[2] == name)
        alone = (alone[0].model_copy(update={"weight": 1.0}),)
        section = section.model_copy(update={"components": alone, "max_unscored_frac": 1.0})
        async with Rewards.from_config(section, folder, window_samples=100) as rewards:
            return await rewards.score(group)

    expected = asyncio.run(in_process())
    body = RewardRequest(reward=name, mode="groupwise", items=items_of(group)).model_dump(mode="json")
    reply = RewardReply.model_validate(served.post("/v1/rewards", body).json())
    assert [result.score for result in reply.results] == list(expected.rewards)
    for result, score in zip(reply.results, expected.scores[name], strict=True):
        part = result.components[name]
        assert (part.score, part.fault, part.detail, part.metrics) == (
            score.value,
            score.fault,
            score.detail,
            score.metrics,
        )
        assert score_of(result).fault == score.fault


def test_a_component_that_does_not_apply_is_left_out_of_whole_groups_and_never_guessed_of_single_items(tmp_path):
    """One reward knows the rows of one task, as TRL's do by returning None for the others."""
    trl = "def sums(completions, source, **kwargs):\n    return [1.0 if s == 'sums' else None for s in source]\n"
    rewards = "reward: {workers: 1, components: [{use: exact}, {use: 'trl.py:sums', weight: 0.5}]}"
    columns = [{"source": "sums"}, {"source": "poems"}]
    items = [
        {"solution_str": "4", "ground_truth": "4", "extra_info": extra, "group_id": extra["source"]}
        for extra in columns
    ]
    with serving(tmp_path, rewards=rewards, files={"trl.py": trl}) as alone:
        both, left_out = alone.score(*items, mode="groupwise")
        assert (both["score"], left_out["score"]) == (1.5, 1.0)
        assert left_out["components"]["sums"] | {"detail": ""} == {
            "score": None,
            "weight": 0.5,
            "fault": None,
            "detail": "",
            "metrics": {},
        }
        RewardReply.model_validate(alone.post("/v1/rewards", {"items": [{"id": "a", **items[1]}]}).json())
        both, unknown = alone.score(*items)
        assert (both["score"], unknown["score"], unknown["error"]["fault"]) == (1.5, None, "data")
        assert "mode: groupwise" in unknown["error"]["detail"]
        (none,) = alone.score(items[1], reward="sums", mode="groupwise")
        assert none["error"]["detail"] == "no component of the reward applies to this row"


# ---- idempotent by content


def test_the_same_content_is_scored_once_and_answered_alike(served):
    item = {"solution_str": "the same words", "ground_truth": "4", "extra_info": {"a": 1, "b": [2]}}
    (first,) = served.score(item | {"id": "one"})
    hits = served.metric("reward_cache_hits_total")
    (again,) = served.score(item | {"id": "two", "extra_info": {"b": [2], "a": 1}})
    (other_seed,) = served.score(item, seed=1)
    (other_content,) = served.score(item | {"extra_info": {"a": 2}})
    assert not first["cached"] and again["cached"] and served.metric("reward_cache_hits_total") == hits + 1
    assert not other_seed["cached"] and not other_content["cached"]
    assert again["score"] == first["score"] and again["components"] == first["components"]


# ---- practice B: curl


CURL = r"""
curl -X POST http://localhost:8899/compute_reward \
  -H "Content-Type: application/json" \
  -d '{
    "solution_str": "{\"layers\":[{\"type\":\"title\",\"text\":\"Sale\",\"x\":9,\"y\":9,\"width\":300,\"height\":60}]}",
    "ground_truth": {"canvas_size": [400, 300], "layers": [{"type": "title", "text": "Sale", "x": 9, "y": 9,
      "width": 300, "height": 60}]},
    "extra_info": {"sample_id": "test"}
  }'
"""


@pytest.fixture(scope="module")
def poster_service(tmp_path_factory):
    rewards = "reward: {components: [{use: 'hone_poster:poster', args: {visual: heuristic_v1}}]}\n"
    with serving(tmp_path_factory.mktemp("posters"), "--allow-request-weights", rewards=rewards) as running:
        yield running


def test_curl_of_the_guide_is_answered(poster_service):
    command = CURL.replace("http://localhost:8899", poster_service.url).replace(
        "curl ", "curl -sS --fail-with-body ", 1
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["error"] is None and answer["structure_score"] == answer["accuracy_score"] == 1.0
    visual = answer["visual_score"]
    assert 0 < visual <= 1 and answer["score"] == pytest.approx(0.4 + 0.4 + 0.2 * visual)


def test_ground_truth_is_an_object_or_its_text(poster_service):
    asked = {"solution_str": poster_text(x=40), "extra_info": {}}
    as_object = poster_service.post("/compute_reward", asked | {"ground_truth": POSTER}).json()
    as_text = poster_service.post("/compute_reward", asked | {"ground_truth": json.dumps(POSTER)}).json()
    assert as_object == as_text and 0.5 < as_text["score"] < 1


def test_unknown_fields_are_ignored_and_a_path_is_never_opened(poster_service):
    asked = {
        "solution_str": poster_text(),
        "ground_truth": POSTER,
        "jsonl_file_path": "/etc/passwd",
        "what": {"ever": 1},
    }
    answer = poster_service.post("/compute_reward", asked).json()
    assert answer["score"] > 0.8 and "jsonl_file_path is ignored" in answer["warnings"][0]


def test_one_that_cannot_be_scored_is_an_error_alone_and_a_null_among_others(poster_service):
    good, bad = {"solution_str": poster_text(), "ground_truth": POSTER}, {"solution_str": "x", "ground_truth": {}}
    alone = poster_service.post("/compute_reward", bad)
    assert (alone.status_code, alone.json()["type"]) == (422, "urn:hone:problem:unusable-row")
    results = poster_service.post("/compute_reward", {"items": [good, bad, good | {"id": "mine"}]}).json()["results"]
    assert [result["id"] for result in results] == ["item-0", "item-1", "mine"]
    assert results[0]["score"] == results[2]["score"] > 0.8
    assert results[1]["score"] is None and results[1]["error"].startswith("data fault")


def test_weights_come_from_a_request_only_where_that_is_allowed(served, poster_service):
    asked = {"solution_str": "4", "ground_truth": "4", "words_weight": 2}
    refused = served.post("/compute_reward", asked).json()
    assert refused["score"] == 1 + 0.25 and "weights are ignored" in refused["warnings"][0]
    asked = {"solution_str": poster_text(), "ground_truth": POSTER}
    whole = poster_service.post("/compute_reward", asked).json()["score"]
    assert poster_service.post("/compute_reward", asked | {"poster_weight": 3}).json()["score"] == 3 * whole
    assert poster_service.post("/compute_reward", asked | {"weights": {"poster": 3}}).json()["score"] == 3 * whole
    unknown = poster_service.post("/compute_reward", asked | {"weights": {"poser": 3}})
    assert (unknown.status_code, unknown.json()["type"]) == (422, "urn:hone:problem:unknown-weight")


# ---- OpenRLHF, verl, slime


def openrlhf_get_rewards(served_urls, queries, prompts, labels):
    """What OpenRLHF's client does with one or several URLs: the lists are cut into as many pieces as there are URLs,
    and every piece is sent, an empty one too."""
    import httpx

    share = -(-len(queries) // len(served_urls))
    replies = []
    for number, url in enumerate(served_urls):
        cut = slice(number * share, (number + 1) * share)
        response = httpx.post(
            url, json={"query": queries[cut], "prompts": prompts[cut], "labels": labels[cut]}, timeout=30
        )
        response.raise_for_status()
        replies.append(response.json())
    return replies


def test_openrlhf_with_one_url(served):
    prompts, labels = ["Q: 2+2? ", "Q: 2+3? "], ["4", "5"]
    queries = [prompts[0] + "4", prompts[1] + "6 I think"]
    (reply,) = openrlhf_get_rewards([f"{served.url}/get_reward"], queries, prompts, labels)
    assert reply == {
        "rewards": [1.25, 0.75],
        "scores": [1.25, 0.75],
        "extra_logs": {"exact_score": [1.0, 0.0], "words_score": [1.0, 3.0], "model_fault": [0.0, 0.0]},
    }


def test_openrlhf_with_two_urls_and_one_sample_sends_an_empty_list(served):
    url = f"{served.url}/get_reward"
    full, empty = openrlhf_get_rewards([url, url], ["Q: 4"], ["Q: "], ["4"])
    assert full["rewards"] == [1.25]
    assert empty["rewards"] == empty["scores"] == [] and empty["extra_logs"].keys() == full["extra_logs"].keys()


def test_openrlhf_gets_an_error_for_an_unusable_row_rather_than_a_number(served):
    response = served.post("/get_reward", {"query": ["4"], "prompts": [""], "labels": [None]})
    assert (response.status_code, response.json()["retryable"]) == (422, False)


def test_openrlhf_s_special_tokens_are_no_part_of_the_response_and_its_prompts_are_not_scored(served):
    url = f"{served.url}/get_reward?reward=exact"
    prompt = "<|im_start|>user\n2+2? Say 4 or 5.<|im_end|>\n<|im_start|>assistant\n"
    queries = [prompt + "4<|im_end|>", prompt[20:] + "4<|im_end|>", prompt[20:] + "5<|im_end|>", "<s>" + prompt + "4"]
    (reply,) = openrlhf_get_rewards([url], queries, [prompt] * 4, ["4"] * 4)
    assert reply["rewards"] == [1.0, 1.0, 0.0, 1.0]
    uncut = served.post("/get_reward", {"query": ["no prompt of ours: 4"], "prompts": [prompt], "labels": ["4"]})
    assert uncut.status_code == 422 and "does not begin with its prompt" in uncut.json()["detail"]


def test_slime_takes_the_answer_as_the_reward(served):
    asked = {"prompt": [{"role": "user", "content": "2+2?"}], "response": "4<|im_end|>", "label": "4", "metadata": {}}
    assert served.post("/slime", asked).json() == {
        "score": 1.25,
        "exact_score": 1.0,
        "words_score": 1.0,
    }


def test_verl_gets_a_dictionary_with_the_same_keys_for_every_sample(served):
    async def ask():
        # as verl calls it: NumPy scalars in extra_info, and arguments that only verl knows
        row = {"extra_info": {"index": np.int64(3), "weights": np.array([0.5, np.nan])}, "url": served.url}
        verl = {"reward_router_address": "10.0.0.1:80", "reward_model_tokenizer": object()}
        texts = ["4", "four", "", "a b c d e f g h i j k", "long" * (1 << 20)]
        return await asyncio.gather(*(compute_score("math", text, np.str_("4"), **row, **verl) for text in texts))

    scores = asyncio.run(ask())
    assert [score["score"] for score in scores] == [1.25, 0.25, 0.0, 2.0, 0.0]
    assert {tuple(score) for score in scores} == {("score", "exact_score", "words_score", "model_fault")}


def test_verl_gets_an_exception_or_the_constant_it_asked_for(served):
    def ask(**more):
        return asyncio.run(compute_score("math", "4", None, {}, url=served.url, **more))

    with pytest.raises(RewardError, match="could not score a sample: data: the row has no answer"):
        ask()
    assert ask(unscored=-1.0) == {"score": -1.0, "exact_score": -1.0, "words_score": 1.0, "model_fault": 0.0}
    with pytest.raises(RewardError, match="HTTP 404"):
        ask(reward="nope")


# ---- state


def test_health_names_what_scores_and_by_what_rules(served):
    health = served.client.get("/health")
    body = health.json()
    assert health.status_code == 200 and body["status"] == "healthy" and body["model_loaded"] is True
    assert list(body["components"]) == ["exact", "words", "gsm8k", "poster", "place"]
    assert body["fingerprint"].startswith("sha256:") and body["queue_depth"] == 0 and body["uptime_s"] > 0
    assert served.client.get("/livez").status_code == served.client.get("/readyz").status_code == 200
    assert "no token: every program of this machine may ask" in served.log.read_text()


def test_metrics_have_the_names_that_dashboards_use(served):
    served.score({"solution_str": "4", "ground_truth": "4"}, {"solution_str": "4"})
    text = served.client.get("/metrics").text
    assert 'reward_requests_total{code="200",route="/v1/rewards"}' in text
    assert 'reward_items_total{fault="data",reward="whole",status="error"}' in text
    for name in ("reward_item_seconds_bucket", "reward_score_bucket", "reward_batch_size_bucket"):
        assert f"{name}{{" in text
    for name in (
        "reward_queue_depth 0.0",
        "reward_inflight 1.0",
        "reward_ready 1.0",
        "reward_worker_restarts_total 0.0",
    ):
        assert f"\n{name}\n" in text, name


def test_request_id_and_traceparent_come_back_and_are_logged(served):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    sent = {"X-Request-Id": "step-12/batch:3", "traceparent": trace}
    response = served.post("/v1/rewards", {"items": []}, headers=sent)
    assert (response.headers["x-request-id"], response.headers["traceparent"]) == ("step-12/batch:3", trace)
    line = f"request=step-12/batch:3 traceparent={trace}"  # written once the answer is sent
    wait_for(lambda: line in served.log.read_text(), served.process, served.log)
    made = served.post("/v1/rewards", {"items": []}, headers={"X-Request-Id": "new\tline"})
    assert len(made.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "given",
    [
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 forged",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "POST /v1/rewards 200 0.1 ms request=forged",
    ],
)
def test_a_traceparent_that_is_none_is_neither_logged_nor_sent_on(served, given):
    sent = {"X-Request-Id": "after-trace", "traceparent": given}
    response = served.post("/v1/rewards", {"items": []}, headers=sent)
    assert response.status_code == 200 and "traceparent" not in response.headers
    wait_for(lambda: "request=after-trace" in served.log.read_text(), served.process, served.log)
    assert given not in served.log.read_text()


@pytest.mark.parametrize("tokens", [10**30, 1 << 62, (1 << 18) + 1])
def test_a_length_that_no_response_has_is_refused(served, tokens):
    answer = served.post("/v1/rewards", {"items": [{"id": "a", "solution_str": "", "response_tokens": tokens}]})
    assert answer.status_code == 422 and "response_tokens" in answer.json()["detail"]


def test_openapi_is_what_was_published(served):
    """`python tests/serve/test_reward_protocol.py URL` writes it anew; /v1 may only ever gain optional fields."""
    published = json.loads((Path(__file__).parent / "openapi.json").read_text())
    assert served.client.get("/openapi.json").json() == published


if __name__ == "__main__":
    import sys
    import urllib.request

    document = json.load(urllib.request.urlopen(f"{sys.argv[1]}/openapi.json"))
    (Path(__file__).parent / "openapi.json").write_text(json.dumps(document, indent=1) + "\n")
