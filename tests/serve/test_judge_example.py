"""examples/judge: its data are what its script makes, its prompts are those that the run will ask, its marks parse."""

import asyncio
import gzip
import importlib.util
import json
from pathlib import Path

from hone.config.load import load_config
from hone.data.chat import load_tokenizer
from hone.reward.judge.parse import Reading
from hone.reward.judge.scorer import JudgeReward
from hone.reward.openai import ChatAnswer

EXAMPLE = Path(__file__).parents[2] / "examples" / "judge"
ROWS = [json.loads(line) for line in gzip.decompress((EXAMPLE / "judge.jsonl.gz").read_bytes()).splitlines()]


def test_the_data_are_what_the_script_makes(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("judge_make_data", EXAMPLE / "make_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    assert gzip.decompress((tmp_path / "judge.jsonl.gz").read_bytes()).splitlines() == [
        json.dumps(row).encode() for row in ROWS
    ]


def test_prompts_are_those_that_the_run_will_ask_and_marks_are_scores(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    loaded = load_config(EXAMPLE / "run.yaml", [f"services.judge.policy={tmp_path}"])
    args = loaded.config.reward.components[0].args
    tokenizer = load_tokenizer(load_config(EXAMPLE / "judge.yaml").config.model, EXAMPLE)
    reading = Reading(("grm_boxed",), 1, 10)

    async def ask_as_the_run_does(rows: list[dict]) -> None:
        judge = JudgeReward.from_args(args, folder=EXAMPLE, timeout_s=5, services={"judge": "http://127.0.0.1:1"})
        try:
            assert await judge.start() == []
            for row in rows:
                reference, response = (line.strip() for line in row["prompt"].splitlines())
                item = {"question": "", "reference": reference, "columns": {}, "response": response}
                assert tokenizer.render(await judge.functions.prompt(item)) == row["prompt"]
                assert reading.scores(ChatAnswer(row["mark"], "stop"), 1) == [10 if response == reference else 1]
                assert tokenizer.decode(tokenizer.encode_responses([row["mark"]])[0]) == row["mark"]
        finally:
            await judge.close()

    asyncio.run(ask_as_the_run_does(ROWS[:50]))
