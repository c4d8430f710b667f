"""Whatever is sent to the reward service, it answers as it says it would, and never with a 500."""

import gzip
import json
import random

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from random_search import examples
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import POSTER, poster_text, serving

from hone.reward.wire import RewardReply


def never_500(context, response, case):
    """503 and 504 are honest answers, to a deadline of 1 ms for example."""
    assert response.status_code in (503, 504) or response.status_code < 500


CHECKS = [never_500, status_code_conformance, content_type_conformance, response_schema_conformance]
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example]
PATHS = ("/v1/rewards", "/compute_reward", "/get_reward", "/slime")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fuzzed"), "--allow-request-weights") as running:
        yield running
        assert running.client.get("/health").json()["status"] == "healthy"
        assert "Traceback" not in running.log.read_text()


def limits(count):
    return examples(count, suppress_health_check=QUIET, phases=[Phase.explicit, Phase.generate])


@pytest.mark.property
def test_every_route_keeps_to_its_description(served):
    document = served.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    tried = 0
    session = requests.Session()
    for found in schema.get_all_operations():
        operation = found.ok()

        @limits(2)
        @given(case=operation.as_strategy())
        def one(case):
            case.call_and_validate(base_url=served.url, checks=CHECKS, session=session)

        one()
        tried += 1
    session.close()
    assert tried == 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({"role": st.text(), "content": JSON})
TO_JSON = {"Content-Type": "application/json"}
ITEM = st.fixed_dictionaries(
    {"id": st.text(min_size=1, max_size=4), "solution_str": st.text(max_size=40)},
    optional={
        "group_id": st.text(min_size=1, max_size=2),
        "ground_truth": JSON,
        "extra_info": st.dictionaries(st.text(max_size=4), JSON, max_size=3),
        "prompt": st.text(max_size=5)
        | st.lists(st.fixed_dictionaries({"role": st.text(), "content": JSON}), max_size=2),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "response_token_ids": st.lists(st.integers(), max_size=4),
    },
)
REQUEST = st.fixed_dictionaries(
    {"items": st.lists(ITEM, max_size=5)},
    optional={
        "reward": st.sampled_from(["exact", "gsm8k", "poster", "words", "place", "nope", None]),
        "mode": st.sampled_from(["pointwise", "groupwise"]),
        "seed": st.integers(),
    },
)


@limits(80)
@given(request=REQUEST)
def ask_for_rewards(served, request):
    response = served.client.post(
        "/v1/rewards", content=json.dumps(request), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (200, 400, 404, 422), response.text
    if response.status_code == 200:
        reply = RewardReply.model_validate_json(response.content)  # finite, in range, the sum of its parts
        assert [result.id for result in reply.results] == [item["id"] for item in request["items"]]
        assert len({tuple(result.metrics) for result in reply.results}) <= 1


@pytest.mark.property
def test_any_items_are_answered_or_refused(served):
    ask_for_rewards(served)


@limits(60)
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()), path=st.sampled_from(PATHS))
def send_bytes(served, body, path):
    response = served.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 422), response.text


@pytest.mark.property
def test_any_bytes_are_answered_or_refused(served):
    send_bytes(served)


@pytest.mark.parametrize("path", PATHS)
def test_damaged_bodies_are_answered_or_refused(served, path):
    """Bytes of a good body changed, cut out or doubled; and the same of its gzip."""
    bodies = {
        "/v1/rewards": {"items": [{"id": "a", "solution_str": poster_text(), "ground_truth": POSTER}]},
        "/compute_reward": {"solution_str": poster_text(), "ground_truth": json.dumps(POSTER), "extra_info": {}},
        "/get_reward": {"query": ["Q: 4"], "prompts": ["Q: "], "labels": ["4"]},
        "/slime": {"prompt": "Q", "response": "4", "label": "4"},
    }
    dice = random.Random(path)
    plain = json.dumps(bodies[path]).encode()
    for number in range(40):
        gzipped = number % 2 == 1
        body = bytearray(gzip.compress(plain) if gzipped else plain)
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(len(body))
            body[place : place + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 2))
        headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if gzipped else {})
        response = served.client.post(path, content=bytes(body), headers=headers)
        assert response.status_code in (200, 400, 422), response.text


def test_no_number_that_is_not_finite_comes_out(served):
    """A sum that is beyond what floats hold is no answer."""
    too_much = {"solution_str": "4", "ground_truth": "4", "weights": {"exact": 1e308, "words": 1e308, "place": 1e308}}
    response = served.post("/compute_reward", too_much)
    assert (response.status_code, response.json()["type"]) == (503, "urn:hone:problem:unscored")
    assert "is out of range" in response.json()["detail"]
