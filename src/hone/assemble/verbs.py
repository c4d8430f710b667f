"""`hone check`, `hone eval`, `hone eval-judge` and `hone export`: what looks at a run without training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from hone.assemble.job import first_cause, in_new_loop, located, set_up_arithmetic
from hone.assemble.models import model_before, named_model, scalar_model, tokenizer_of, weights_before, with_adapter
from hone.assemble.sampling import evaluation_sampling, make_engine, make_rewards
from hone.assemble.services import claim_devices, services_for_verb
from hone.config.derived import component_name, trains_adapter
from hone.config.load import Loaded
from hone.config.run import RunConfig
from hone.data.chat import Tokenizer, resolve_model
from hone.data.prompts import load_prompts
from hone.devices import devices_here
from hone.errors import ConfigError, DataError
from hone.loop.evaluate import Evaluation, evaluate
from hone.model.base import CausalModel
from hone.model.heads import ScalarModel
from hone.model.load import load_model, save_hf
from hone.model.lora import save_adapter
from hone.reward.judge.evaluate import Figures, evaluate_judge, read_pairs
from hone.reward.judge.scorer import JudgeReward
from hone.reward.resolve import Unusable
from hone.run import check as preflight
from hone.run.folder import RunFolder
from hone.run.report import CheckReport
from hone.services.gpus import settled_on
from hone.services.supervisor import Services
from hone.train.checkpoint import Checkpoints, SavedCheckpoint
from hone.train.optim import FlatWeights
from hone.train.policy import refuse_other_base

_UPLOAD_ERRORS = (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, httpx.HTTPError, OSError)


def check_run(loaded: Loaded, *, start_services: bool = False) -> CheckReport:
    """Everything that `hone check` looks at beyond the configuration; with its services only if they are to start.

    Raises:
        ServiceError: one of them did not get ready.
    """
    if not start_services:
        return in_new_loop(preflight.check(loaded))
    split = claim_devices(loaded.config)

    async def run(services: Services) -> CheckReport:
        async with services:
            await services.ready()
            return await preflight.check(loaded, services.addresses)

    with TemporaryDirectory(prefix="hone-check-") as folder:
        return in_new_loop(run(services_for_verb(loaded, split, Path(folder))))


def evaluate_run(loaded: Loaded, *, model: Path | None = None) -> Evaluation:
    """Sample and score the evaluation data with the run's final weights, or with those in a directory.

    Raises:
        DataError: no evaluation data, or no weights yet.
    """
    loaded, _ = settled_on(loaded, devices_here(loaded.config.run.device))
    config, base_dir = loaded.config, loaded.run_file.parent
    split = claim_devices(config)
    device = set_up_arithmetic(config.run)
    weights = model or RunFolder(loaded.run_dir).hf
    if not weights.is_dir():
        raise DataError(
            f"{weights}: no weights to evaluate. Train first, export a checkpoint there with `hone export`, "
            "or name a model directory with --model."
        )
    tokenizer = tokenizer_of(loaded)
    prompts = load_prompts(config.data, tokenizer, base_dir, seed=config.seed, part="eval")
    dtype = getattr(torch, config.run.compute_dtype)
    policy = load_model(weights, dtype=dtype, device=device, implementation=config.model.implementation)
    sampling = evaluation_sampling(config)

    async def run(services: Services) -> Evaluation:
        async with services:
            engine = await make_engine(config, tokenizer, policy, base_dir)
            try:
                await services.ready()
                window, served = len(prompts), services.addresses
                async with make_rewards(config, base_dir, window_samples=window, services=served) as rewards:
                    return await evaluate(engine, rewards, prompts.rows(), sampling, config.eval, seed=config.seed)
            finally:
                await engine.close()

    try:
        # a folder of its own: the run folder's logs are the training run's
        with located(loaded), TemporaryDirectory(prefix="hone-eval-") as folder:
            return in_new_loop(run(services_for_verb(loaded, split, Path(folder))))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


def export_run(
    loaded: Loaded,
    *,
    to: Path,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
) -> Path | str:
    """Write the weights of a checkpoint as a Hugging Face directory that must not exist yet.

    Returns the directory, or the address of the repository that it was uploaded to.

    Args:
        step: of the RL stage (or of the only stage); None takes the newest whole checkpoint.
        best: take the step where `checkpoint.best` was highest instead.
        adapter: write the adapter alone, in peft's format; else what it was learnt beside, with it merged in.
        push_to_hub: a repository of the hub to upload it to; a new one is private unless `public`.
    """
    if to.exists():
        raise DataError(f"{to} exists. Name a folder that does not; nothing is overwritten.")
    folder = RunFolder.read(loaded.run_dir)
    saved = wanted_checkpoint(loaded.config, folder, step, best=best)
    # Before the weights are read: a token that is missing is known at once.
    repository = None if push_to_hub is None else HubRepository(push_to_hub, is_private=not public)
    tokenizer = tokenizer_of(loaded)
    model = model_of(saved, loaded, folder, tokenizer)
    if adapter:
        if not isinstance(model, CausalModel) or model.adapter is None:
            raise DataError(f"{saved.path}: stage {saved.progress.stage} trained every weight: there is no adapter.")
        place = weights_before(saved.progress.stage, loaded.config, folder)
        named = resolve_model(loaded.config.model.path or "", loaded.run_file.parent) if place is None else place
        save_adapter(to, model, str(Path(named).resolve()) if Path(named).is_dir() else str(named))
    else:
        eos_ids = tokenizer.eos_ids if isinstance(model, CausalModel) else ()
        dtype = getattr(torch, loaded.config.checkpoint.export_precision)
        save_hf(
            to,
            model.hf_config,
            model.named_weights(),
            tokenizer.hf,
            eos_ids=eos_ids,
            processor=tokenizer.processor,
            dtype=dtype,
        )
    if repository is None:
        return to
    return repository.upload(to, f"{loaded.name}, {saved.progress.stage} step {saved.progress.step}, by Hone")


def wanted_checkpoint(config: RunConfig, folder: RunFolder, step: int | None, *, best: bool) -> SavedCheckpoint:
    """The checkpoint that was asked for; the newest whole one if none was."""
    checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
    if step is not None and best:
        raise DataError("--step and --best exclude each other; choose one.")
    if step is not None:
        return checkpoints.at(config.stages[-1], step)
    saved = checkpoints.newest()
    if saved is None:
        raise DataError(f"{folder.checkpoints}: no checkpoint yet. The run writes one every checkpoint.every updates.")
    if not best:
        return saved
    if saved.progress.best_step is None:
        raise DataError(
            f"{folder.checkpoints}: no step is known as the best. Set checkpoint.best to a metric of evaluation, "
            "such as eval/accuracy, and continue with --resume."
        )
    return checkpoints.at("rl", saved.progress.best_step)


def model_of(
    saved: SavedCheckpoint, loaded: Loaded, folder: RunFolder, tokenizer: Tokenizer
) -> CausalModel | ScalarModel:
    """The model that a checkpoint was taken of, on the CPU, at the precision of its master weights."""
    config, stage, device = loaded.config, saved.progress.stage, torch.device("cpu")
    if trains_adapter(config, stage):
        model = with_adapter(config, model_before(stage, loaded, folder, tokenizer, device), stage)
        refuse_other_base(model, saved.rest)
    else:
        model = named_model(config, tokenizer, loaded.run_file.parent, device)
    if stage == "reward_model":
        model = scalar_model(config, tokenizer, model)
    FlatWeights(model, torch.float32).fill(saved.tensors)
    return model


def evaluate_judge_of(loaded: Loaded, pairs: Path, *, name: str | None, url: str | None) -> Mapping[str, float]:
    """Figures of one judge.

    Args:
        name: of the component, where the file has several judges.
        url: ask there instead of where the component's args say.
    Raises:
        ConfigError: no such judge, or its args do not fit.
        DataError: rows that are not pairs.
    """
    judges = {component_name(c): c for c in loaded.config.reward.components if c.use == "judge"}
    wanted = next(iter(judges)) if name is None and len(judges) == 1 else name
    if wanted not in judges:
        known = f"its judges: {', '.join(judges)}; choose one with --name" if judges else "it has none (`use: judge`)"
        raise ConfigError([f"{loaded.run_file}: which judge? {known}."])
    component = judges[wanted]
    args = dict(component.args)
    if url is not None:
        args.pop("service", None)
        args["url"] = url
    rows = read_pairs(pairs)
    try:
        judge = JudgeReward.from_args(args, folder=loaded.run_file.parent, timeout_s=component.timeout_s)
    except Unusable as error:
        raise ConfigError([f"{loaded.run_file}: {component_name(component)}: {error}"]) from error

    async def run() -> Figures:
        try:
            problems = await judge.start()
            if problems:
                raise ConfigError(problems)
            return await evaluate_judge(judge, rows)
        finally:
            await judge.close()

    return asyncio.run(run()).metrics()


class HubRepository:
    """A model repository of the hub, made if it is not there. Token and hub are those of huggingface_hub: of
    `hf auth login` or HF_TOKEN, and HF_ENDPOINT.

    Args:
        name: `owner/name`, or a name of the user's own.
        is_private: of a new one; one that is there stays as it is.
        endpoint: of the hub; None: the one that huggingface_hub is set to.

    Raises:
        DataError: no token, no right to write, or no answer.
    """

    def __init__(self, name: str, *, is_private: bool = True, endpoint: str | None = None) -> None:
        self._api = HfApi(endpoint=endpoint)
        try:
            self.name = self._api.create_repo(name, private=is_private, exist_ok=True).repo_id
        except _UPLOAD_ERRORS as error:
            raise DataError(
                f"{name}: no such repository could be made on {self._api.endpoint}: {_upload_cause(error)}"
            ) from error

    def upload(self, folder: Path, message: str) -> str:
        """Every file of a directory, as one commit. Returns the address of the repository. Raises DataError."""
        try:
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except _UPLOAD_ERRORS as error:
            raise DataError(f"{folder}: not uploaded to {self.name}: {_upload_cause(error)}") from error
        return f"{self._api.endpoint}/{self.name}"


def _upload_cause(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{first} Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
