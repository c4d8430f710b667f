"""What `hone check` looks at beyond the configuration: data, tokenizer, model and rewards, on real rows.

Nothing is trained or sampled. What cannot be looked at here (a hub model without a network) is named as not checked
instead of being passed over.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hone.cluster.devices import split_devices, visible_devices
from hone.cluster.launch import engine_note
from hone.cluster.placement import topology_here
from hone.config.derived import longest_tokens, service_uses, services_of, unused_services
from hone.config.files import flat
from hone.config.load import Loaded, load_rewards
from hone.config.report import CheckReport
from hone.config.run import RunConfig
from hone.config.topology import Topology, judge_services, judges_pool, topology_lines
from hone.data.chat import Tokenizer, load_tokenizer, resolve_model
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.data.sources import BadRow, read_rows
from hone.errors import ConfigError, DataError, PlacementError, ServiceError
from hone.loop.sft import imitation_rows
from hone.model.load import describe_model, init_config, read_config
from hone.model.lora import check_targets
from hone.reward.base import Rewards, component_name
from hone.reward.builtin import BUILTIN, OF_ANSWERS, OF_SHAPE, POOLED, as_response
from hone.reward.transport import Address
from hone.rollout.env_pool import EnvironmentPool
from hone.types import Fault, Group, Prompt, Sample

PREVIEWS = 2
MAX_ROWS_OF_USER_REWARDS = 256
"""A user's reward may be slow or cost money; the pure built-in ones see every row, and give gold answers one score."""


@dataclass
class Findings:
    """A report in the making."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    figures: dict[str, float | int | str] = field(default_factory=dict)
    topology: Topology | None = None

    def report(self) -> CheckReport:
        placement = self.topology.as_dict() if self.topology else None
        return CheckReport(tuple(self.lines), tuple(self.problems), tuple(self.not_checked), self.figures, placement)


async def check(loaded: Loaded, services: Mapping[str, Address] = MappingProxyType({})) -> CheckReport:
    """Look at everything a run of this file would use. Problems are collected; only a bug raises.

    Args:
        services: addresses of those services of the run file that are running, by name.
    """
    config, folder, findings = loaded.config, loaded.run_file.parent, Findings()
    if config.cluster.backend != "local":
        check_placement(config, findings)
    tokenizer = check_tokenizer_and_model(config, folder, findings)
    if config.critic.path is not None:
        check_critic(config, folder, tokenizer, findings)
    if config.lora.rank > 0:
        check_adapter(config, folder, tokenizer, findings)
    if tokenizer is not None:
        check_prompts(config, folder, tokenizer, findings)
    if await can_be_had(loaded, services, findings) and config.reward.components:
        if config.data.answer_column is not None:
            await check_rewards(config, folder, services, findings)
        else:
            findings.not_checked.append("rewards: data.answer_column is not set, so there are no gold answers to score")
    if config.rollout.environment.use is not None:
        await check_environment(config, folder, findings)
    if config.services:
        check_services(config, folder, services, findings)
    return findings.report()


def check_placement(config: RunConfig, findings: Findings) -> None:
    """Who would work where; whether a cluster has these devices free is known only when it is asked for them."""
    try:
        findings.topology = topology_here(config, visible_devices())
        findings.lines += topology_lines(findings.topology)
    except PlacementError as error:
        findings.problems.append(str(error))


def check_tokenizer_and_model(config: RunConfig, folder: Path, findings: Findings) -> Tokenizer | None:
    """The tokenizer, if it can be had; the model's files, as far as they are on this machine."""
    model = config.model
    is_hub_name = False
    try:
        if model.path is not None:
            place = resolve_model(model.path, folder)
            is_hub_name = not Path(place).is_dir()
            if is_hub_name:
                findings.not_checked.append(
                    f"weights of {model.path}: a hub name; they are fetched when training starts"
                )
            else:
                findings.figures |= describe_model(Path(place), trust_remote_code=model.trust_remote_code)
        return load_tokenizer(model, folder)
    except DataError as error:
        if is_hub_name:
            findings.not_checked.append(f"prompts and tokens: {error}")
        else:
            findings.problems.append(str(error))
        return None


def check_critic(config: RunConfig, folder: Path, tokenizer: Tokenizer | None, findings: Findings) -> None:
    """The directory that the critic starts from: it must read the policy's token ids, and its longest sample."""
    path = str(config.critic.path)
    try:
        place = Path(resolve_model(path, folder))
        if not place.is_dir():
            findings.not_checked.append(f"critic {path}: a hub name; it is fetched when training starts")
            return
        trust = config.model.trust_remote_code
        described = describe_model(place, trust_remote_code=trust)
        findings.figures |= {f"critic, {name}": value for name, value in described.items()}
        critic = read_config(place, trust_remote_code=trust)
        policy = Path(resolve_model(config.model.path, folder)) if config.model.path is not None else None
    except DataError as error:
        findings.problems.append(f"critic.path: {error}")
        return
    wanted = tokenizer.vocab_size if tokenizer is not None and policy is None else None
    if policy is not None and policy.is_dir():
        wanted = getattr(read_config(policy, trust_remote_code=trust), "vocab_size", None)
    found, limit = getattr(critic, "vocab_size", None), getattr(critic, "max_position_embeddings", None)
    if None not in (wanted, found) and wanted != found:
        findings.problems.append(
            f"critic.path: {path} has a vocabulary of {found} tokens, the policy's has {wanted}. The critic reads the "
            "policy's token ids: take a model with the same tokenizer."
        )
    if limit is not None and limit < longest_tokens(config):
        findings.problems.append(
            f"critic.path: {path} reads {limit} tokens (max_position_embeddings), the longest sample has "
            f"{longest_tokens(config)}."
        )


def check_prompts(config: RunConfig, folder: Path, tokenizer: Tokenizer, findings: Findings) -> None:
    """Render and tokenise every row that the run would use; show the first few."""
    learns_preferences = "reward_model" in config.stages
    reads_eval = config.data.eval is not None and not learns_preferences
    try:
        for part in ("train", "eval"):
            if (part == "train" and not train_has_prompts(config)) or (part == "eval" and not reads_eval):
                continue
            stream = load_prompts(config.data, tokenizer, folder, seed=config.seed, part=part)
            prompts = stream.rows()
            findings.lines.append(f"{part}: {stream.report}")
            lengths = np.array([len(prompt.token_ids) for prompt in prompts])
            findings.figures[f"{part} rows"] = len(prompts)
            findings.figures[f"{part} prompt tokens, mean"] = float(lengths.mean())
            findings.figures[f"{part} prompt tokens, 95th percentile"] = float(np.percentile(lengths, 95))
            findings.figures[f"{part} prompt tokens, longest"] = int(lengths.max())
            if part == "train":
                findings.lines += [preview(prompt) for prompt in prompts[:PREVIEWS]]
        if "sft" in config.stages:
            rows, report = imitation_rows(config, tokenizer, folder)
            findings.lines.append(f"sft: {report}")
            findings.lines.append(
                f"  imitates {tokenizer.decode(rows[0].response)!r}, {len(rows[0].response)} tokens with EOS"
            )
        if learns_preferences:
            for part in ("train", "eval"):
                pairs, report = load_pairs(
                    config.data, config.rm, tokenizer, folder, max_tokens=longest_tokens(config), part=part
                )
                findings.lines.append(f"pairs to {'learn from' if part == 'train' else 'measure on'}: {report}")
            findings.lines.append(f"  prefers {tokenizer.decode(pairs[0].chosen)!r}")
            findings.lines.append(f"  to      {tokenizer.decode(pairs[0].rejected)!r}, by {pairs[0].margin:g}")
    except DataError as error:
        findings.problems.append(str(error))


def preview(prompt: Prompt) -> str:
    """A prompt as text and as tokens."""
    text = prompt.text if len(prompt.text) <= 300 else f"{prompt.text[:200]} ... {prompt.text[-100:]}"
    first = ", ".join(map(str, prompt.token_ids[:12])) + (", ..." if len(prompt.token_ids) > 12 else "")
    return f"  {text!r} -> {len(prompt.token_ids)} tokens: {first}"


def check_adapter(config: RunConfig, folder: Path, tokenizer: Tokenizer | None, findings: Findings) -> None:
    """The layers that get an adapter: whether the model has them is known from its architecture alone."""
    model = config.model
    try:
        if model.init is not None:
            architecture = init_config(model.init, vocab_size=tokenizer.vocab_size if tokenizer else None)
        else:
            place = Path(resolve_model(str(model.path), folder))
            if not place.is_dir():
                findings.not_checked.append(f"lora.targets: {model.path} is a hub name, read when training starts")
                return
            architecture = read_config(place, trust_remote_code=model.trust_remote_code)
        layers = check_targets(
            architecture, config.lora, model.implementation, trust_remote_code=model.trust_remote_code
        )
        findings.lines.append(f"adapter of rank {config.lora.rank} beside every {', '.join(layers)}")
    except DataError as error:
        if str(error) not in findings.problems:  # a model that cannot be read was told already
            findings.problems.append(str(error))


async def check_environment(config: RunConfig, folder: Path, findings: Findings) -> None:
    """Import it where it will run. What it answers is known only when the policy writes something."""
    environments = EnvironmentPool(config.rollout.environment, folder)
    try:
        await environments.start()
        findings.lines.append(f"environment: {config.rollout.environment.use} can be imported")
    except ConfigError as error:
        findings.problems += error.problems
    finally:
        await environments.close()


def check_services(config: RunConfig, folder: Path, services: Mapping[str, Address], findings: Findings) -> None:
    """What would be started, with which GPUs. Their programs and files are looked at with the configuration."""
    try:
        split = split_devices(config, visible_devices())
    except ServiceError as error:
        findings.problems.append(str(error))
        return
    findings.lines += split.notes
    if split.training:
        findings.lines.append(f"training sees GPU {split.training}")
    for name, service in config.services.items():
        what = service.reward or service.policy or " ".join(service.command or ())
        gpus = f"GPU {split.services[name]}" if split.services[name] else "no GPU"
        replicas = 1
        if name in judge_services(config) and (pool := judges_pool(config)):
            gpus, replicas = f"in pool {pool}", len(findings.topology.judges) if findings.topology else 1
        where = f"running at {', '.join(services[name].urls)}" if name in services else "started with the run"
        parts = (what, gpus, engine_note(service, folder, replicas), where)
        findings.lines.append(f"service {name}: {'; '.join(filter(None, parts))}")
    findings.lines += [f"service {name}: no reward names it in its args" for name in unused_services(config)]


async def can_be_had(loaded: Loaded, services: Mapping[str, Address], findings: Findings) -> bool:
    """Make every reward from its args, those that ask services and those that services serve too; start none."""
    config, num_problems = loaded.config, len(findings.problems)
    somewhere = dict.fromkeys(config.services, "http://127.0.0.1:1") | dict(services)
    sections = [("", config.reward, loaded.run_file.parent, somewhere)] if config.reward.components else []
    for name, service in config.services.items():
        if service.reward is not None:
            try:
                served = load_rewards(loaded.path(service.reward))
            except ConfigError as error:
                findings.problems += [f"services.{name}.reward: {problem}" for problem in error.problems]
                continue
            sections.append((f"services.{name}.reward: ", served.config.reward, served.run_file.parent, {}))
    for where, section, folder, known in sections:
        try:
            rewards = Rewards.from_config(section, folder, window_samples=1, services=known)
            await rewards.close()
        except ConfigError as error:
            findings.problems += [f"{where}{problem}" for problem in error.problems]
    return len(findings.problems) == num_problems


async def check_rewards(config: RunConfig, folder: Path, services: Mapping[str, Address], findings: Findings) -> None:
    """Score each gold answer as if the policy had written it, then each gold answer under another row's question."""
    waiting = {name for _, name in service_uses(config)} - services.keys()
    findings.not_checked += [
        f"rewards of service {name}: it is started with the run; `hone check --services` starts it" for name in waiting
    ]
    placed = [c for c in config.reward.components if c.use == "reward_model" and config.cluster.backend != "local"]
    findings.not_checked += [f"reward {component_name(c)}: its model is for the cluster's devices" for c in placed]
    components = tuple(
        c
        for c in config.reward.components
        if c.use not in OF_SHAPE and c not in placed and not any(name in waiting for _, name in services_of(c))
    )
    findings.not_checked += [
        f"reward {component_name(c)}: a gold answer alone says nothing about it"
        for c in config.reward.components
        if c.use in OF_SHAPE
    ]
    prompts = gold_prompts(config, folder, findings)
    is_fast = all(component.use in BUILTIN for component in components)
    checked = prompts if is_fast else prompts[:MAX_ROWS_OF_USER_REWARDS]
    if not checked or not any(component.weight for component in components):
        return
    settings = config.reward.model_copy(
        update={"components": components, "max_unscored_frac": 1.0, "min_valid_per_group": 1}
    )
    response = partial(as_response, next((c.use for c in components if c.use in OF_ANSWERS), ""))
    async with Rewards.from_config(settings, folder, window_samples=len(checked), services=services) as rewards:
        away = services_away(await rewards.score(as_group(checked[0], response(checked[0].answer))), config)
        if away:
            findings.not_checked += away
            return
        right = [await rewards.score(as_group(prompt, response(prompt.answer))) for prompt in checked]
        wrong = [
            await rewards.score(as_group(prompt, response(answer)))
            for prompt, answer in zip(checked, answers_of_others(checked), strict=True)
            if answer is not None
        ]
    findings.figures["gold answers"] = len(checked)
    for component in components:
        exact = component.use in OF_ANSWERS
        report_component(component_name(component), right, wrong, findings, must_be_exact=exact)


def services_away(group: Group, config: RunConfig) -> list[str]:
    """What built-in rewards say that asked a service in vain: it may be started only with the run, or after this."""
    ours = [component_name(component) for component in config.reward.components if component.use in POOLED]
    first = [(name, group.scores[name][0]) for name in ours if name in group.scores]
    return [f"reward {name}: {score.detail}" for name, score in first if score.fault is Fault.INFRA]


def report_component(
    name: str, right: Sequence[Group], wrong: Sequence[Group], findings: Findings, *, must_be_exact: bool
) -> None:
    """Figures of one reward component, and problems where it faults or misjudges gold answers."""
    scores = [group.scores[name][0] for group in right]
    values = [score.value for score in scores if score.value is not None]
    others = [value for group in wrong if (value := group.scores[name][0].value) is not None]
    findings.figures[f"{name}: gold answers score"] = float(np.mean(values)) if values else "nothing"
    findings.figures[f"{name}: shuffled answers score"] = float(np.mean(others)) if others else "nothing"
    faulty = [(group, score) for group, score in zip(right, scores, strict=True) if score.fault is not None]
    for group, score in faulty[:3]:
        findings.problems.append(f"reward {name}: gold answer of row {group.prompt.id}: {score.fault}: {score.detail}")
    if len(faulty) > 3:
        findings.problems.append(f"reward {name}: {len(faulty)} of {len(right)} gold answers have a fault")
    best = max(values, default=0.0)
    missed = [
        group for group, score in zip(right, scores, strict=True) if score.value is not None and score.value < best
    ]
    if must_be_exact and missed:
        example = missed[0].prompt
        findings.problems.append(
            f"reward {name}: {len(missed)} of {len(right)} gold answers do not earn the full score, the first is row "
            f"{example.id}: {str(example.answer)[-80:]!r}. The policy could not earn it there either."
        )


def train_has_prompts(config: RunConfig) -> bool:
    """Whether `data.train` holds prompts, and not only pairs or whole conversations."""
    return "rl" in config.stages or (config.sft.messages_column is None and "reward_model" not in config.stages)


def gold_prompts(config: RunConfig, folder: Path, findings: Findings) -> list[Prompt]:
    """The rows of train and eval as prompts without tokens: rewards read text. Rows without an answer are a problem."""
    data = config.data
    sources = [(data.train, data.train_split, data.train_rows)] if train_has_prompts(config) else []
    if data.eval is not None:
        sources.append((data.eval, data.eval_split, data.eval_rows))
    prompts: list[Prompt] = []
    unusable: list[str] = []
    for source, split, rows in sources:
        for number, row in enumerate(read_rows(source, folder, split=split, rows=rows)):
            if isinstance(row, BadRow):
                unusable.append(f"{row.where}: {row.problem}")
                continue
            values = flat(row.values)
            if (answer := values.get(data.answer_column or "")) is None:
                unusable.append(f"{row.where}: no answer in column {data.answer_column}")
            else:
                asked = values.get(data.prompt_column, "")
                messages = tuple(asked) if isinstance(asked, list) else None
                prompts.append(Prompt(f"{source}:{number}", number, str(asked), (), answer, row.values, messages))
    findings.figures["rows without a gold answer"] = len(unusable)
    if unusable and data.on_bad_row == "error":
        findings.problems.append(f"{unusable[0]} ({len(unusable)} such rows)")
    return prompts


def as_group(prompt: Prompt, response: object) -> Group:
    """A group of one finished sample with this text; of an object or a list, as JSON."""
    text = json.dumps(response) if isinstance(response, dict | list) else str(response)
    return Group(prompt, (Sample(prompt.id, 0, (), (), (), "stop", text),))


def answers_of_others(prompts: Sequence[Prompt]) -> list[object | None]:
    """For each prompt the answer of another one that ends in another word, so that none is right by chance.

    Sorted by their last word and moved by the size of the largest set of equals, no answer meets its equal, unless
    more than half of them are equal: None then stands where no other answer is left.
    """
    words = [(str(prompt.answer).split() or [""])[-1].strip("$.").replace(",", "") for prompt in prompts]
    order = sorted(range(len(prompts)), key=words.__getitem__)
    shift = max(Counter(words).values(), default=0)
    answers: list[object | None] = [None] * len(prompts)
    for place, row in enumerate(order):
        other = order[(place + shift) % len(order)]
        answers[row] = prompts[other].answer if words[other] != words[row] else None
    return answers
