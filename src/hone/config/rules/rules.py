"""Cross-field rules: a function for what belongs together, all violations reported together.

A rule sees a valid `RunConfig` and yields breaches. Rules of the algorithm and of adapters are in `algorithm.py`, of
engines and services in `engines.py`, of the `cluster` section in `placement.py` and `division.py`; those that look at
the world outside the run file in `data.py` (data files) and `files.py` (rewards, model directories). Bounds of one key
are in `config/run.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hone.config.derived import (
    component_name,
    has_answers,
    longest_tokens,
    run_dir,
    section_of,
    source_weights,
)
from hone.config.rewards import builtin_reward
from hone.config.rules import Breach
from hone.config.rules.algorithm import ALGORITHM_RULES
from hone.config.rules.data import key_of, lists_of_sources, sources_of, template_columns
from hone.config.rules.division import heads_divide, optimizer_steps_divide_the_update
from hone.config.rules.engines import ENGINE_RULES
from hone.config.rules.files import (
    FILE_RULES,
    PROGRAM_RULES,
    architecture_of,
)
from hone.config.rules.placement import CLUSTER_RULES
from hone.config.run import DataSection, RunConfig
from hone.doctor.rules import NAMES
from hone.errors import nearest

Rule = Callable[[RunConfig], Iterator[Breach]]

MAX_NAME = 128
"""Characters of `run.name`."""
_ROWS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


def breaches(config: RunConfig, run_file: Path, *, needs_programs: bool = True) -> list[Breach]:
    """Every rule that the configuration breaks.

    Args:
        needs_programs: also those of programs that a run starts; a plan starts none.
    """
    folder = run_file.parent  # where relative paths of the run file start
    found = [breach for rule in RULES for breach in rule(config)]
    file_rules = (*FILE_RULES, *PROGRAM_RULES) if needs_programs else FILE_RULES
    found += [breach for file_rule in file_rules for breach in file_rule(config, folder)]
    found += [*length_fits_context(config, folder), *heads_divide(config, architecture_of(config, folder))]
    return [*found, *run_folder_is_its_own(config, run_file)]


def one_model_source(config: RunConfig) -> Iterator[Breach]:
    model = config.model
    if model.path is None and model.init is None:
        keys = ("model.path", "model.init")
        yield Breach(keys, "is required: a model directory or hub name here, or an architecture in model.init")
    if model.path is not None and model.init is not None:
        yield Breach(
            ("model.path", "model.init"),
            f"contradicts model.init: weights come from {model.path} or a random start. Set the other to null",
        )
    if model.init is not None and not isinstance(model.init.get("model_type"), str):
        yield Breach(("model.init.model_type", "model.init"), "is required, such as qwen3, as in a model's config.json")


def one_tokenizer(config: RunConfig) -> Iterator[Breach]:
    model = config.model
    if model.characters is not None and model.tokenizer is not None:
        yield Breach(("model.characters", "model.tokenizer"), "contradicts model.tokenizer: set one of them to null")
    if model.override and model.path is None:
        keys = ("model.override", "model.init")
        yield Breach(keys, "replaces keys of the config.json in model.path: with model.init, write them there")
    if "model_type" in model.override:
        yield Breach(("model.override.model_type", "model.override"), "cannot be replaced: weights are of one class")
    if model.characters is not None and model.path is not None:
        yield Breach(
            ("model.characters", "model.path"),
            "is for model.init only: the model in model.path was trained with its own tokenizer",
        )
    if model.init is not None and model.characters is None and model.tokenizer is None:
        keys = ("model.tokenizer", "model.init", "model.characters")
        yield Breach(keys, "is required with model.init: a tokenizer directory here, or text in model.characters")
    if model.characters == "":
        yield Breach(("model.characters",), "must hold at least one character, or be null")


def some_layers_are_recomputed(config: RunConfig) -> Iterator[Breach]:
    layers = config.train.activation_checkpointing
    if isinstance(layers, int) and layers < 1:
        key = "train.activation_checkpointing"
        yield Breach((key,), f"must be at least 1 layer, or none, selective or full (got {layers}). Nearest: none")


def template_or_chat(config: RunConfig) -> Iterator[Breach]:
    """Once for `data`, and for each source that replaces some of it."""
    yield from _template_or_chat(config.data, "data", lambda name: f"data.{name}")
    for path, source in sources_of(config):
        own = section_of(config.data, source)
        if own != config.data:
            yield from _template_or_chat(own, path, key_of(path, source))


def _template_or_chat(data: DataSection, section: str, key: Callable[[str], str]) -> Iterator[Breach]:
    """`key`: the path of a key by its name, where it is set."""
    chat = f"{section}.chat"
    if data.chat and data.template is not None:
        message = f"contradicts {chat} = true: turn one of them off (null, or false)"
        yield Breach((key("template"), key("chat")), message)
    if data.image_columns and not data.chat:
        keys = (key("image_columns"), key("chat"))
        yield Breach(keys, f"needs {chat} = true: the chat template says where a picture stands")
    if data.image_columns and data.too_long != "drop":
        keys = ("data.too_long", key("image_columns"))
        yield Breach(keys, f"must be drop where prompts have pictures, which cannot be cut (got {data.too_long})")
    if data.system is not None and not data.chat:
        keys = (key("system"), key("chat"))
        yield Breach(keys, f"is only used by a chat template: set {chat} to true, or drop it")
    if data.last_turn == "answer" and not data.chat:
        keys = (key("last_turn"), key("chat"))
        yield Breach(keys, f"answer needs {chat} = true: only a list of messages has turns")
    if data.template is not None and not template_columns(data.template):
        yield Breach((key("template"),), "names no column in braces, so every prompt would be the same. Add {prompt}")


def rows_are_ranges(config: RunConfig) -> Iterator[Breach]:
    rows = {
        "data.train_rows": config.data.train_rows,
        "data.eval_rows": config.data.eval_rows,
        "sft.rows": config.sft.rows,
    }
    for key, value in rows.items():
        if value is not None and not _ROWS.fullmatch(value):
            yield Breach((key,), f"must be start:stop as in Python, such as 0:1000, 1000: or :-100 (got {value!r})")


def sources_fit_together(config: RunConfig) -> Iterator[Breach]:
    for path, sources in lists_of_sources(config).items():
        if sources == ():
            yield Breach((path,), "names no source. Add one")
        weighted = (number for number, source in enumerate(sources or ()) if source.weight is not None)
        if path != "data.train" and (number := next(weighted, None)) is not None:
            message = f"every row of {path} is used once, so its sources have no weights. Leave it out"
            yield Breach((f"{path}.{number}.weight",), message)
    weights = {f"data.train.{number}.weight": one.weight for number, one in enumerate(config.data.train)}
    lacking = [path for path, weight in weights.items() if weight is None]
    if lacking and len(lacking) < len(weights):
        given = next(path for path, weight in weights.items() if weight is not None)
        yield Breach((lacking[0],), f"is required, as {given} is set: give every source a weight, or none")
    elif weights and not lacking and not any(weights.values()):
        yield Breach((*weights,), "every weight is 0, so there is nothing to train on. Give a source a weight")


def order_is_possible(config: RunConfig) -> Iterator[Breach]:
    data = config.data
    sorts = data.order in ("ascending", "descending")
    if sorts and data.order_column is None:
        keys = ("data.order_column", "data.order")
        yield Breach(keys, f"is required with data.order = {data.order}: the column with the number to sort by")
    if not sorts and data.order_column is not None:
        keys = ("data.order_column", "data.order")
        yield Breach(keys, f"is only used with data.order = ascending or descending (got {data.order})")
    if sorts and source_weights(data) is not None:
        yield Breach(
            ("data.order", "data.train.0.weight"),
            f"= {data.order} sorts the rows of all sources together, so weights cannot be used: leave them out "
            "of data.train, or set the order to shuffled",
        )
    low, high = data.pass_rate_bounds
    if not 0 <= low < high <= 1:
        yield Breach(
            ("data.pass_rate_bounds",), f"must be two numbers from 0 to 1, the lower first (got {low:g}, {high:g})"
        )
    if data.order == "pass_rate" and "rl" not in config.stages:
        yield Breach(
            ("data.order", "stages"), "= pass_rate needs stage rl, which measures pass rates. Nearest: shuffled"
        )


def stages_have_what_they_train_on(config: RunConfig) -> Iterator[Breach]:
    if len(set(config.stages)) < len(config.stages):
        yield Breach(("stages",), f"must name each stage once (got {', '.join(config.stages)})")
    environment_rewards = config.rollout.environment.use is not None
    if "rl" in config.stages and not config.reward.components and not environment_rewards:
        yield Breach(("reward.components", "stages"), "is required for stage rl: at least one, such as `- use: exact`")
    weights = [component.weight for component in config.reward.components]
    if "rl" in config.stages and weights and not any(weights) and not environment_rewards:
        yield Breach(("reward.components",), "every weight is 0, so there is nothing to learn. Give one a weight")
    sft = config.sft
    if "sft" in config.stages and not (sft.response_column or sft.messages_column or has_answers(config)):
        keys = ("sft.response_column", "data.answer_column", "stages")
        yield Breach(keys, "is required for stage sft (or data.answer_column): the column to train on")
    if sft.messages_column is not None and sft.response_column is not None:
        keys = ("sft.messages_column", "sft.response_column")
        yield Breach(keys, "contradicts sft.response_column: conversations or single responses. Set one to null")
    needing = [component.use for component in config.reward.components if builtin_reward(component.use).gold]
    if "rl" in config.stages and needing and not has_answers(config):
        keys = ("data.answer_column", "reward.components")
        yield Breach(keys, f"is required by reward {needing[0]}, which compares with the gold answer: name its column")


def reward_model_stage_is_possible(config: RunConfig) -> Iterator[Breach]:
    if "reward_model" not in config.stages:
        return
    if config.stages[-1] != "reward_model" or "rl" in config.stages:
        yield Breach(
            ("stages",),
            f"reward_model must come last and without rl (got {', '.join(config.stages)}): it leaves no policy. "
            "Train it in a run file of its own, and name its hf/ folder in a reward of the other",
        )
    if config.data.eval is None:
        keys = ("data.eval", "stages")
        yield Breach(keys, "is required for stage reward_model: held-out pairs, to measure accuracy and scores on")


def rewards_have_distinct_names(config: RunConfig) -> Iterator[Breach]:
    names: dict[str, int] = {}
    for number, component in enumerate(config.reward.components):
        name = component_name(component)
        if component.name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            key = f"reward.components.{number}.name"
            yield Breach((key,), f"must be letters, digits and _, for names of metrics (got {name!r})")
        if name in names:
            keys = (f"reward.components.{number}.name", f"reward.components.{number}.use", "reward.components")
            yield Breach(keys, f"{name!r} is also entry {names[name]}'s name; give one of them another `name`")
        names.setdefault(name, number)


def environment_is_whole(config: RunConfig) -> Iterator[Breach]:
    environment = config.rollout.environment
    if environment.use is None and environment.args:
        keys = ("rollout.environment.use", "rollout.environment.args")
        yield Breach(keys, "is required with rollout.environment.args: what takes them")
    for number, component in enumerate(config.reward.components):
        if environment.use is not None and component_name(component) == "environment":
            keys = (f"reward.components.{number}.name", f"reward.components.{number}.use")
            yield Breach(keys, "'environment' is the name of the environment's own reward; give this another `name`")


def stops_are_usable(config: RunConfig) -> Iterator[Breach]:
    if "" in config.rollout.stop:
        yield Breach(("rollout.stop",), "holds an empty text, which would end every response at once")
    negative = [number for number in config.rollout.stop_token_ids if number < 0]
    if negative:
        yield Breach(("rollout.stop_token_ids",), f"must be at least 0 each (got {negative[0]})")
    vocab_size = (config.model.init or {}).get("vocab_size")
    if isinstance(vocab_size, int):
        for number in config.rollout.stop_token_ids:
            if number >= vocab_size:
                keys = ("rollout.stop_token_ids", "model.init.vocab_size")
                yield Breach(keys, f"must be below the vocabulary's size, {vocab_size} (got {number})")


def a_sample_fits(config: RunConfig) -> Iterator[Breach]:
    longest, got = longest_tokens(config), config.train.tokens_per_microbatch
    if "reward_model" in config.stages and longest <= got < 2 * longest:
        yield Breach(
            ("train.tokens_per_microbatch", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"must hold the longest pair of stage reward_model, twice {_longest(config)} (got {got}). "
            f"Nearest: {2 * longest}",
        )
    if got < longest:
        yield Breach(
            ("train.tokens_per_microbatch", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"must hold the longest sample, {_longest(config)} (got {got}). Nearest: {longest}",
        )
    cache = config.rollout.kv_cache_tokens
    if cache is not None and cache < longest:
        yield Breach(
            ("rollout.kv_cache_tokens", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"must hold the longest sample, {_longest(config)} (got {cache}). Nearest: {longest}",
        )


def deterministic_runs_wait(config: RunConfig) -> Iterator[Breach]:
    staleness = config.rollout.max_staleness
    if config.run.deterministic and staleness:
        yield Breach(
            ("run.deterministic", "rollout.max_staleness"),
            f"= true cannot be guaranteed with rollout.max_staleness = {staleness}: which weights sample a token then "
            "depends on timing, so no two runs are the same. Nearest: 0; or run.deterministic = false",
        )


def length_fits_context(config: RunConfig, folder: Path) -> Iterator[Breach]:
    limit = architecture_of(config, folder).get("max_position_embeddings")
    if not isinstance(limit, int) or isinstance(limit, bool) or longest_tokens(config) <= limit:
        return
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    cures = {"rollout.max_response_tokens": limit - prompt, "data.max_prompt_tokens": limit - response}
    nearest = " or ".join(f"{key} = {room}" for key, room in cures.items() if room > 0)
    yield Breach(
        (*cures, "model.path", "model.init"),
        f"the longest sample, {_longest(config)}, exceeds the model's context (max_position_embeddings), {limit}. "
        + (f"Nearest: {nearest}" if nearest else "Lower both"),
    )


def _longest(config: RunConfig) -> str:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    return f"max_prompt_tokens + max_response_tokens = {prompt} + {response} = {prompt + response}"


def betas_are_decay_rates(config: RunConfig) -> Iterator[Breach]:
    sections = {"train": config.train, "critic": config.critic, "sft": config.sft}
    for path, optimizer in ((name, section.optimizer) for name, section in sections.items()):
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield Breach(
                (f"{path}.optimizer.betas",), f"must be at least 0 and below 1 each (got {list(optimizer.betas)})"
            )


def evaluation_is_possible(config: RunConfig) -> Iterator[Breach]:
    settings = config.eval
    for k in settings.pass_k:
        if not 1 <= k <= settings.samples:
            yield Breach(
                ("eval.pass_k", "eval.samples"),
                f"must be between 1 and eval.samples = {settings.samples} each (got {k}): pass@k needs k samples",
            )
    if settings.temperature == 0 and settings.samples > 1:
        yield Breach(
            ("eval.samples", "eval.temperature"),
            f"must be 1 with eval.temperature = 0 (got {settings.samples}): greedy samples are all the same",
        )
    if settings.every > 0 and config.data.eval is None:
        yield Breach(
            ("eval.every", "data.eval"), f"= {settings.every} needs data.eval: there is nothing to evaluate on"
        )


def best_is_measured(config: RunConfig) -> Iterator[Breach]:
    """`checkpoint.best` needs evaluations to compare, by a metric of which more is better."""
    best, settings = config.checkpoint.best, config.eval
    if best is None:
        return
    known = ["eval/accuracy", "eval/reward_mean", *(f"eval/pass@{k}" for k in settings.pass_k)]
    per_value = settings.by is not None and re.fullmatch(rf"eval/accuracy\[{re.escape(settings.by)}=.*\]", best)
    if best not in known and not per_value:
        known += [f"eval/accuracy[{settings.by}=...]"] if settings.by is not None else []
        keys = ("checkpoint.best", "eval.pass_k", "eval.by")
        yield Breach(keys, f"must be one of {', '.join(known)}, of which more is better (got {best!r})")
    if settings.every == 0 or "rl" not in config.stages:
        keys = ("checkpoint.best", "eval.every", "stages")
        yield Breach(keys, f"= {best} needs evaluations to choose from: stage rl with eval.every above 0")


def run_name_may_name_a_folder(config: RunConfig) -> Iterator[Breach]:
    name = config.run.name
    if name is not None and (not re.fullmatch(r"\w[\w .+=-]*", name) or len(name) > MAX_NAME):
        yield Breach(
            ("run.name",),
            f"must be letters, digits, blanks and _ . + = -, at most {MAX_NAME}, because run.dir may use it "
            f"(got {name!r})",
        )


def run_folder_is_its_own(config: RunConfig, run_file: Path) -> Iterator[Breach]:
    """`--fresh` moves the run's folder aside: it must never be one that holds anything else."""
    text = config.run.dir
    if re.search(r"[{}\0\n]", text.replace("{name}", "")):
        yield Breach(("run.dir",), f"may hold {{name}} and no other brace or control character (got {text!r})")
        return
    path = run_dir(config, run_file)
    taken = [Path.home()]
    for folder in (run_file.parent.resolve(), Path.cwd()):
        taken += [folder, *folder.parents]
    if path.resolve() in taken:
        yield Breach(
            ("run.dir",), f"must be a folder of the run's own, such as runs/{{name}}; {text!r} holds other things"
        )
        return
    try:
        file = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    except OSError as error:
        yield Breach(("run.dir",), f"cannot be a folder: {error.strerror} (got {text!r})")
        return
    if file is not None:
        yield Breach(("run.dir",), f"{file} is a file; the run needs a folder there (got {text!r})")


def alarms_are_known(config: RunConfig) -> Iterator[Breach]:
    for name in config.observe.stop_on:
        if name not in NAMES:
            close = nearest(name, NAMES, cutoff=60)
            meant = f"Did you mean {close}?" if close else f"Alarms: {', '.join(NAMES)}"
            yield Breach(("observe.stop_on",), f"has {name!r}, which is not an alarm. {meant}")


RULES: tuple[Rule, ...] = (
    one_model_source,
    one_tokenizer,
    some_layers_are_recomputed,
    template_or_chat,
    rows_are_ranges,
    sources_fit_together,
    order_is_possible,
    run_name_may_name_a_folder,
    stages_have_what_they_train_on,
    reward_model_stage_is_possible,
    rewards_have_distinct_names,
    environment_is_whole,
    optimizer_steps_divide_the_update,
    stops_are_usable,
    a_sample_fits,
    deterministic_runs_wait,
    betas_are_decay_rates,
    evaluation_is_possible,
    best_is_measured,
    alarms_are_known,
    *ALGORITHM_RULES,
    *CLUSTER_RULES,
    *ENGINE_RULES,
)
