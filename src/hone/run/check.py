"""`hone check` beyond the configuration: data, tokenizer, model and rewards, on real rows.

Nothing of the run is trained or sampled; a small model of its class is. What cannot be looked at here (a hub model
without a network) is named as not checked instead of being passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from hone.config.derived import longest_tokens, needs_critic, unused_services
from hone.config.load import Loaded, load_config
from hone.config.run import RunConfig
from hone.config.topology import Topology, judge_services, judges_pool, topology_lines
from hone.data.chat import Tokenizer, load_tokenizer, resolve_model
from hone.data.lazy import SampleSize
from hone.devices import device_of, visible_devices
from hone.errors import ConfigError, DataError, PlacementError, ServiceError
from hone.model.load import describe_model, init_config, read_config
from hone.model.lora import check_targets, refuse_other_adapter
from hone.reward.http import Address
from hone.reward.rewards import Rewards
from hone.rollout.env_pool import EnvironmentPool
from hone.run.check_rewards import MOST_TRIED, check_rewards
from hone.run.check_rows import check_other_rows, check_prompts
from hone.run.refusals import refused_by_names, refused_by_tokenizer, starting_architecture
from hone.run.report import CheckReport
from hone.run.trial import try_model
from hone.services.gpus import assumed_devices, settled_on, split_devices, topology_on
from hone.services.launch import engine_note, plan_launches
from hone.services.process import holder, is_free
from hone.services.state import kept_up, runtime_folder

SAMPLE = SampleSize(20_000)
"""Of larger sources, rows at even distances."""
USUAL_LR = (1e-9, 1e-2)
"""AdamW moves each weight by about the learning rate at every step."""


async def check(
    loaded: Loaded,
    services: Mapping[str, Address] = MappingProxyType({}),
    *,
    sample: SampleSize = SAMPLE,
    most_tried: int = MOST_TRIED,
) -> CheckReport:
    """Check everything a run of this file would use. Problems are collected; only a bug raises.

    Args:
        services: addresses of those services of the run file that are running, by name.
        sample: what to read of the data.
        most_tried: rows that rewards are tried on.
    """
    findings, written = CheckReport(), loaded.config
    loaded, choices = settled_on(loaded, assumed_devices(written))
    config, folder = loaded.config, loaded.run_file.parent
    check_settings(config, findings)
    findings.lines += map(str, choices)
    topology = check_placement(config, findings) if config.cluster.backend == "ray" else None
    tokenizer = check_tokenizer_and_model(config, folder, findings)
    await check_class(config, folder, tokenizer, findings)
    if config.critic.path is not None:
        check_critic(config, folder, tokenizer, findings)
    if config.lora.rank > 0:
        check_adapter(config, folder, tokenizer, findings)
    streams = check_prompts(config, folder, tokenizer, sample, findings) if tokenizer is not None else []
    if tokenizer is not None:
        check_other_rows(config, folder, tokenizer, sample, findings)
    if await can_be_had(loaded, services, findings) and config.reward.components:
        await check_rewards(config, folder, streams, tokenizer, services, findings, most_tried=most_tried)
    if config.rollout.environment.use is not None:
        await check_environment(config, folder, findings)
    if config.services:
        check_services(config, folder, services, topology, findings)
    # Each once, behind the line of the run file whose key it begins with.
    findings.problems = list(dict.fromkeys(map(loaded.located, findings.problems)))
    findings.warnings = list(dict.fromkeys(map(loaded.located, findings.warnings)))
    return findings


def check_settings(config: RunConfig, findings: CheckReport) -> None:
    """Values that the configuration allows, and with which nothing would be trained or started on this machine."""
    if "rl" in config.stages and config.run.steps == 0:
        findings.problems.append("run.steps: 0 updates, so stage rl would learn nothing. Nearest: 1")
    try:
        device_of(config.run.device, "run.device")
    except DataError as error:
        findings.problems.append(str(error))
    used = {"train": {"rl", "reward_model"}, "sft": {"sft"}, "critic": {"rl"} if needs_critic(config) else set()}
    for name, stages in used.items():
        lr = getattr(config, name).optimizer.lr
        if stages & set(config.stages) and not USUAL_LR[0] <= lr <= USUAL_LR[1]:
            what = "every step would overwrite the weights" if lr > USUAL_LR[1] else "the weights would not move"
            findings.warnings.append(
                f"{name}.optimizer.lr: {lr:g} is far from usual learning rates of AdamW (1e-7 to 1e-3): {what}"
            )


def check_placement(config: RunConfig, findings: CheckReport) -> Topology | None:
    """Placement of roles on devices; whether a cluster's devices are free is known only when the run starts."""
    if "rl" in config.stages and config.cluster.engines.use == "vllm" and find_spec("vllm") is None:
        findings.not_checked.append(
            "cluster.engines: use is vllm, which this Python does not have. Where the run is started, install "
            "hone-rl[vllm] (docs/vllm.md), or leave `use` out"
        )
    if config.cluster.address is not None and config.cluster.devices_per_node is None:
        findings.not_checked.append("placement: the Ray cluster at cluster.address is asked when the run starts")
        return None
    try:
        topology = topology_on(config, assumed_devices(config))
    except PlacementError as error:
        findings.problems.append(str(error))
        return None
    findings.placement = topology.as_dict()
    findings.lines += topology_lines(topology)
    return topology


def check_tokenizer_and_model(config: RunConfig, folder: Path, findings: CheckReport) -> Tokenizer | None:
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
                findings.figures |= describe_model(
                    Path(place), trust_remote_code=model.trust_remote_code, override=model.override
                )
        return load_tokenizer(model, folder, config.data.template_args)
    except DataError as error:
        if is_hub_name:
            findings.not_checked.append(f"prompts and tokens: {error}")
        else:
            findings.problems.append(str(error))
        return None


async def check_class(config: RunConfig, folder: Path, tokenizer: Tokenizer | None, findings: CheckReport) -> None:
    """Try a small model of the same class in engine and trainer."""
    try:
        vocab_size = tokenizer.vocab_size if tokenizer is not None else None
        architecture = starting_architecture(config.model, folder, vocab_size=vocab_size)
    except DataError as error:
        model = config.model
        is_here = model.path is None or Path(resolve_model(model.path, folder)).is_dir()
        if not findings.problems and is_here:
            findings.problems.append(str(error))
        elif not findings.problems:
            findings.not_checked.append(f"whether engine and trainer can run the model: {error}")
        return
    if tokenizer is not None and (differs := refused_by_tokenizer(architecture, tokenizer)):
        findings.problems.append(differs)
    trial = await try_model(config, architecture)
    findings.lines += [f"model: {trial.proven}"] if trial.proven else []
    findings.problems += [trial.refused] if trial.refused else []
    if not findings.problems and config.model.path is not None:
        place = Path(resolve_model(config.model.path, folder))
        if place.is_dir() and (differs := refused_by_names(config, architecture, place)):
            findings.problems.append(differs)
    findings.not_checked += [trial.untried] if trial.untried else []


def check_critic(config: RunConfig, folder: Path, tokenizer: Tokenizer | None, findings: CheckReport) -> None:
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
        text = read_config(policy, trust_remote_code=trust).get_text_config(decoder=True)
        wanted = getattr(text, "vocab_size", None)
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


def check_adapter(config: RunConfig, folder: Path, tokenizer: Tokenizer | None, findings: CheckReport) -> None:
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
            architecture = read_config(place, trust_remote_code=model.trust_remote_code, override=model.override)
        if config.lora.start is not None and (start := Path(resolve_model(config.lora.start, folder))).is_dir():
            refuse_other_adapter(start, config.lora)
        layers = check_targets(
            architecture, config.lora, model.implementation, trust_remote_code=model.trust_remote_code
        )
        findings.lines.append(f"adapter of rank {config.lora.rank} beside every {', '.join(layers)}")
    except DataError as error:
        findings.problems.append(str(error))


async def check_environment(config: RunConfig, folder: Path, findings: CheckReport) -> None:
    """Import the environment in a worker process, as the run does. Its replies need a policy and are not checked."""
    environments = EnvironmentPool(config.rollout.environment, folder)
    try:
        await environments.start()
        findings.lines.append(f"environment: {config.rollout.environment.use} can be imported")
    except ConfigError as error:
        findings.problems += error.problems
    finally:
        await environments.close()


def check_services(
    config: RunConfig,
    folder: Path,
    services: Mapping[str, Address],
    topology: Topology | None,
    findings: CheckReport,
) -> None:
    """Services that would be started, and their GPUs. Their programs and files are checked with the configuration."""
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
            gpus, replicas = f"in pool {pool}", len(topology.judges) if topology else 1
        where = f"running at {', '.join(services[name].urls)}" if name in services else "started with the run"
        parts = (what, gpus, engine_note(service, folder, replicas), where)
        findings.lines.append(f"service {name}: {'; '.join(filter(None, parts))}")
    findings.lines += [f"service {name}: no reward names it in its args" for name in unused_services(config)]
    kept = {service.fingerprint for state in kept_up(runtime_folder()).values() for service in state.services}
    in_pools = judge_services(config) if judges_pool(config) else ()
    for launch in plan_launches(config, folder, folder, split, without=in_pools, token=""):  # none is started
        if not launch.service.port or launch.name in services or launch.fingerprint in kept:
            continue
        try:
            if is_free(launch.port):
                continue
            why = f"is taken by {holder(launch.port)}. End that, or set it to 0, which takes a free one"
        except PermissionError:
            why = "is below 1024, where only root may listen. Set it to 0, which takes a free one"
        findings.problems.append(f"services.{launch.name}.port: {launch.port} {why}")


async def can_be_had(loaded: Loaded, services: Mapping[str, Address], findings: CheckReport) -> bool:
    """Make every reward from its args, those that ask services and those that services serve too; start none."""
    config, num_problems = loaded.config, len(findings.problems)
    somewhere = dict.fromkeys(config.services, "http://127.0.0.1:1") | dict(services)
    sections = [("", config.reward, loaded.run_file.parent, somewhere)] if config.reward.components else []
    for name, service in config.services.items():
        if service.reward is not None:
            try:
                served = load_config(loaded.path(service.reward), needed="reward")
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
