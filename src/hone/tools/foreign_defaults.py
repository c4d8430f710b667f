"""Generator of `hone/dialects/facts/`: defaults of foreign tools by version, read from their released wheels.

Run as `python -m hone.tools.foreign_defaults FOLDER`, with the wheels of the versions in FOLDER (`pip download
--no-deps verl==0.9.1`). Wheels are read as archives and their Python as syntax: nothing of them is imported. Only keys
that a table has a row for are kept, and of each only the versions where its default changes.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config.render import flattened
from hone.config.yaml_tree import read_yaml
from hone.dialects.foreign import ABSENT, version_key
from hone.dialects.translate import dialects
from hone.dialects.values import plain_value
from hone.runtime.files import write_whole

FACTS = Path(__file__).parents[1] / "dialects" / "facts"
Defaults = dict[str, Any]

TRAINING_ARGUMENTS: Defaults = {
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
    "bf16": False,
    "gradient_checkpointing": False,
}
"""Of Transformers' `TrainingArguments`, which TRL's classes extend; equal in all releases that the facts cover."""

MINDSPEED: Defaults = {
    **{
        f"{section}_config.{key}": value
        for section in ("actor", "critic")
        for key, value in {
            "lr_decay_style": "linear",
            "min_lr": 0.0,
            "weight_decay": 0.01,
            "clip_grad": 1.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
        }.items()
    },
    "rl_config.mini_batch_size": 1,
    "rl_config.max_prompt_length": 512,
    "rl_config.epochs": 1,
    "rl_config.clip_ratio": 0.2,
    "rl_config.entropy_coeff": 0.001,
    "rl_config.gamma": 1.0,
    "rl_config.lam": 0.95,
    "rl_config.init_kl_coef": 0.01,
    "rl_config.kl_penalty": "kl",
    "rl_config.adv_estimator": "group_norm",
    "rl_config.verifier_function": ["base_acc"],
    "rl_config.verifier_weight": [1.0],
    "rl_config.n_samples_per_prompt": 1,
}
"""Of its classes `RLConfig` and `MegatronConfig`; the tool is not released as a wheel."""
PRIME: Defaults = {
    "orchestrator.group_size": 1,
    "orchestrator.algo.type": "grpo",
    "max_async_level": 1,
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "trainer.loss.kl_tau": 1e-3,
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.optim.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
}
"""Of its classes `TrainerConfig`, `DefaultLossConfig` and `AdamWConfig`; the tool is not released as a wheel."""

NANOCHAT: Defaults = {
    "device_batch_size": 8,
    "examples_per_step": 16,
    "num_samples": 16,
    "max_new_tokens": 256,
    "temperature": 1.0,
    "top_k": 50,
    "matrix_lr": 0.02,
    "weight_decay": 0.0,
    "num_epochs": 1,
    "save_every": 60,
    "eval_every": 60,
    "eval_examples": 400,
    "source": "sft",
}
"""Of `scripts/chat_rl.py`; the tool is not released as a wheel."""


def main() -> None:
    folder = Path(sys.argv[1])
    for tool, read in (("verl", _verl), ("openrlhf", _openrlhf), ("trl", _trl)):
        wheels = sorted(folder.glob(f"{tool}-*.whl"), key=lambda path: version_key(_version(path)))
        found = [(_version(path), dict(read(zipfile.ZipFile(path)))) for path in wheels]
        _write(tool, found)
    _write("mindspeed", [("2.2", {"*": MINDSPEED})])
    _write("prime-rl", [("0.5", {"*": PRIME})])
    _write("nanochat", [("0.1.0", {"*": NANOCHAT})])


def _version(path: Path) -> str:
    return path.name.split("-")[1]


def _write(tool: str, found: Sequence[tuple[str, Mapping[str, Defaults]]]) -> None:
    dialect = dialects()[tool]
    programs: dict[str, dict[str, list[tuple[str, Any]]]] = {}
    for version, defaults in found:
        for program, values in defaults.items():
            steps = programs.setdefault(program, {})
            names = {dialect.aliases.get(key, key) for key in values}
            for name, known in steps.items():
                if name not in names and known and known[-1][1] != ABSENT:
                    known.append((version, ABSENT))
            for key, value in sorted(values.items()):
                name = dialect.aliases.get(key, key)
                if name != key and name in values:
                    continue  # an older name that is still there
                known = steps.setdefault(name, [])
                if name in dialect.rows and (not known or known[-1][1] != value):
                    known.append((version, value))
    kept = {name: {key: steps for key, steps in keys.items() if steps} for name, keys in programs.items()}
    lines = [f'{{"versions": {json.dumps([version for version, _ in found])}, "programs": {{']
    for number, (name, keys) in enumerate(kept.items()):
        lines.append(f"{json.dumps(name)}: {{")
        entries = [f"{json.dumps(key)}: {json.dumps(steps)}" for key, steps in keys.items()]
        lines.append(",\n".join(entries))
        lines.append("}" + ("," if number < len(kept) - 1 else ""))
    write_whole(FACTS / f"{tool}.json", "\n".join([*lines, "}}"]) + "\n")


def _text(wheel: zipfile.ZipFile, ending: str) -> str | None:
    name = next((name for name in wheel.namelist() if name.endswith(ending)), None)
    return wheel.read(name).decode("utf-8") if name else None


# ---- one function per tool: program -> defaults


def _verl(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Defaults]]:
    text = _text(wheel, "config/_generated_ppo_trainer.yaml") or _text(wheel, "config/ppo_trainer.yaml")
    node, problems = read_yaml(text or "", "verl")
    if node is None:
        raise ValueError(problems)
    tree = flattened(node.plain())
    yield "*", {key: _resolved(tree, value) for key, value in tree.items() if "???" not in str(value)}
    for program in ("fully_async", "one_step_off"):
        own, _ = read_yaml(_text(wheel, f"config/{program}_ppo_trainer.yaml") or "", program)
        if own is not None:
            keys = ("defaults", "hydra.", "rollout.")
            yield program, {key: value for key, value in flattened(own.plain()).items() if not key.startswith(keys)}


def _resolved(tree: Mapping[str, Any], value: Any, depth: int = 0) -> Any:
    """`${a.b}` and `${oc.select:a.b,other}` as the value that they have when nothing is given."""
    if not isinstance(value, str) or not value.startswith("${") or depth > 5:
        return value
    inner = value[2:-1]
    if inner.startswith("oc.select:"):
        name, _, other = inner.removeprefix("oc.select:").partition(",")
        return _resolved(tree, tree[name] if name in tree else plain_value(other), depth + 1)
    return _resolved(tree, tree.get(inner), depth + 1)


def _openrlhf(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Defaults]]:
    yield "*", dict(_arguments(ast.parse(_text(wheel, "cli/train_ppo_ray.py") or "")))


def _arguments(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Defaults of `add_argument` calls; a loop over prefixes with f-strings gives one of each."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        default = given.get("default")
        names = [node.args[0]]
        if isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value).lstrip("-"), _constant(default, given, {})
        elif isinstance(names[0], ast.JoinedStr):
            loop = next((loop for loop in loops if node in set(ast.walk(loop))), None)
            values = (
                ast.literal_eval(loop.iter)
                if loop and isinstance(loop.iter, ast.Tuple | ast.List)
                else ("actor", "critic")
            )
            for value in values:
                suffix = "".join(str(part.value) for part in names[0].values if isinstance(part, ast.Constant))
                yield f"{value}{suffix.removeprefix('--')}", _constant(default, given, {"prefix": value})


def _constant(node: ast.expr | None, given: Mapping[str | None, ast.expr], names: Mapping[str, str]) -> Any:
    if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare):
        other = node.test.comparators[0]
        is_so = isinstance(other, ast.Constant) and names.get("prefix") == other.value
        return _constant(node.body if is_so else node.orelse, given, names)
    if node is None:
        action = given.get("action")
        return False if isinstance(action, ast.Constant) and action.value == "store_true" else None
    try:
        value = ast.literal_eval(node)
    except ValueError:
        found = node.args[0] if isinstance(node, ast.Call) and node.args else None
        value = ast.literal_eval(found) if isinstance(found, ast.Constant) and found.value != "inf" else None
    return list(value) if isinstance(value, tuple) else value


def _trl(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Defaults]]:
    base = {
        **TRAINING_ARGUMENTS,
        **_fields(_text(wheel, "trl/trainer/base_config.py"), "_BaseConfig"),
        **_fields(_text(wheel, "trl/trainer/model_config.py"), "ModelConfig"),
    }
    yield "*", base | _fields(_text(wheel, "trl/trainer/grpo_config.py"), "GRPOConfig")
    for program in ("RLOO", "rloo"):
        yield program, base | _fields(_text(wheel, "trl/trainer/rloo_config.py"), "RLOOConfig")


def _fields(text: str | None, name: str) -> Defaults:
    """Defaults of a dataclass; of a factory, nothing."""
    found: Defaults = {}
    for node in ast.walk(ast.parse(text or "")):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    given = {k.arg: k.value for k in field.value.keywords} if isinstance(field.value, ast.Call) else {}
                    default = given.get("default") if isinstance(field.value, ast.Call) else field.value
                    if default is not None:
                        found[field.target.id] = _constant(default, {}, {})
    return found


if __name__ == "__main__":
    main()
