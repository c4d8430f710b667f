"""Rules of TRL's arguments for model, data and rewards, and of what a script's trainer is called with."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from hone.dialects import shared
from hone.dialects.rows import by
from hone.dialects.values import names, truth
from hone.dialects.verdict import ForeignJob, KeyVerdict, Row, nothing, put, refused, unknown

REWARDS = {"accuracy_reward": "math", "think_format_reward": "format"}

IN_CODE = "the script makes rows in code: write its rows to a JSONL file and name that"

OF_ROWS = ("prompt_column", "answer_column", "system", "template", "chat")
"""Keys of `data` that a script's code says of its rows."""
READERS = ("json", "csv", "parquet")
"""Names that `load_dataset` has for a format, whose files are then in `data_files`."""
_HONES_OWN = ("attn_implementation", "torch_dtype", "dtype", "use_cache", "device_map", "low_cpu_mem_usage")


def _model_arguments(job: ForeignJob, value: Any) -> KeyVerdict:
    if not isinstance(value, dict):
        value = job.plain(value)
    if value and not isinstance(value, dict):
        return refused(f"arguments of the model's class ({value}): edit its config.json")
    others = job.plain({name: one for name, one in (value or {}).items() if one is not None and name not in _HONES_OWN})
    trusts = truth(others.pop("trust_remote_code", False))
    if others.get("revision") == "main":
        del others["revision"]
    if others:
        return refused(f"arguments of the model's class ({', '.join(others)}): edit its config.json")
    return put({"model.trust_remote_code": True}) if trusts else nothing("kernels and dtypes are Hone's own")


MODEL_ARGUMENTS = Row("mapped", ("model.path",), _model_arguments)


def dataset(key: str, split: str) -> Row:
    """A name, or what `load_dataset` is called with in a Python file."""

    def read(job: ForeignJob, value: Any) -> KeyVerdict:
        if not isinstance(value, dict):
            value = {"path": value, "name": job.get("dataset_config"), "split": None}
        if value["path"] is None:
            return unknown(f"{IN_CODE}: {'; '.join(value['code'])}") if value.get("code") else put({})
        found = _sources([value], key, split)
        settings = dict(found.settings) | ({f"{key}_rows": value["rows"]} if "rows" in value else {})
        if key == "data.train":
            settings |= {f"data.{name}": value[name] for name in OF_ROWS if name in value}
        if found.kind == "refused" or not value.get("code"):
            return KeyVerdict(found.kind, settings, found.note)
        return KeyVerdict("hole", settings, f"{IN_CODE}: {'; '.join(value['code'])}")

    return by(read, key)


def mixture(job: ForeignJob, value: Any) -> KeyVerdict:
    """Data sets that TRL joins, one after another, and then shuffles."""
    if not value:
        return nothing("none")
    if not isinstance(value, list) or not all(isinstance(one, dict) and one.get("path") for one in value):
        return refused("each entry must have a path")
    return _sources(value, "data.train", "data.train_split")


def _sources(entries: list[dict[str, Any]], key: str, split_key: str) -> KeyVerdict:
    """Entries of what `load_dataset` takes: `path`, `name`, `data_files`, `data_dir` and `split`."""
    paths: list[tuple[str, str | None]] = []
    rows = share = ""
    for one in entries:
        if one.get("data_dir"):
            return refused(f"data_dir: name the files in {key}")
        split, _, rows = str(one.get("split", "train") or "").partition("[")
        if rows and (len(entries) > 1 or not re.fullmatch(r":\d+\]", rows)):
            share, rows = f"a share of a split ({one['split']}): give rows in {key}_rows; nearest: the whole split", ""
        files = one.get("data_files")
        if isinstance(files, dict):
            files = files.get(split)
        if one["path"] in READERS and files:
            paths += [(str(file), None) for file in (files if isinstance(files, list) else [files])]
        elif files:
            return refused(f"files of a data set on the hub ({files}): name the files in {key}")
        else:
            paths.append((f"{one['path']}:{one['name']}" if one.get("name") else str(one["path"]), split or None))
    splits = {split for _, split in paths} - {None}
    if len(splits) > 1:
        settings = {key: [{"path": path} | ({"split": split} if split else {}) for path, split in paths]}
        return KeyVerdict("refused", settings, share) if share else put(settings)
    settings: dict[str, Any] = {key: paths[0][0] if len(paths) == 1 else [path for path, _ in paths]}
    if splits:
        settings[split_key] = splits.pop()
    if share:
        return KeyVerdict("refused", settings, share)
    return put(settings | ({f"{key}_rows": f"0{rows[:-1]}"} if rows else {}))


def rewards(job: ForeignJob, value: Any) -> KeyVerdict:
    if value is None:
        return nothing("none here")
    listed = value if isinstance(value, list) else names(value)
    weights = job.get("reward_weights")
    components = []
    for item in map(str, listed):
        component = _component(item)
        if isinstance(component, KeyVerdict):
            return component
        components.append(component)
    weights = [1.0] * len(listed) if weights is None else weights if isinstance(weights, list) else [weights]
    return shared.weighted(components, weights, "completions: called as TRL does")


def _component(item: str) -> dict[str, Any] | KeyVerdict:
    """A reward function of TRL's or the author's own, or a model."""
    name = item.rpartition(".")[2].rpartition(":")[2]
    if name == "get_soft_overlong_punishment":
        return refused("algorithm.overlong_buffer_frac and overlong_penalty are this reward")
    if name in REWARDS and ".py:" not in item:
        return {"use": REWARDS[name]}
    if re.fullmatch(r"[\w.]+\.\w+", item):
        module, _, function = item.rpartition(".")
        item = f"{module}:{function}"
    if ":" in item:
        module, _, function = item.partition(":")
        is_importable = module.endswith(".py") or find_spec(module.partition(".")[0])
        return {"use": item if is_importable else f"{module.replace('.', '/')}.py:{function}"}
    if "/" in item:
        return {"use": "reward_model", "args": {"path": item}}
    return unknown(f"{item} is a function of the script: name it as file.py:{item} in reward.components")
