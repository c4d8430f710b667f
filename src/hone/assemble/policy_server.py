"""`hone serve policy`: a server from a model's or a run's name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field

from hone.assemble.job import set_up_arithmetic
from hone.config.load import load_config
from hone.config.run import DataSection, ModelSection, RunSection
from hone.data.chat import load_tokenizer, resolve_model
from hone.data.picture_processors import PictureProcessor
from hone.data.pictures import BrokenPicture, source_of_picture
from hone.devices import DeviceName, devices_here, give_back_memory, is_accelerator, module_of
from hone.errors import DataError, RunFolderError
from hone.model.hf import TransformersModel
from hone.model.load import load_model
from hone.rollout.local import LocalEngine
from hone.run.folder import RunFolder
from hone.serve.http import BearerTokens, HttpSettings, Lifecycle, refuse_open_door
from hone.serve.policy import Policy, PolicyService
from hone.serve.policy_app import policy_app
from hone.serve.running import serve
from hone.types import Picture

STEP_TIMEOUT_S = 600.0
"""An engine that makes no step for so long is given up."""


class PolicySettings(BaseModel):
    """How a served model computes; the one place of the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str | None = None
    """What requests call it; None: the last part of its path."""
    chat_template: Path | None = None
    """Jinja file, instead of the tokenizer's own."""
    device: DeviceName = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0 takes every core that this process may use."""
    max_concurrent: int = Field(64, ge=1)
    """Samples decoded together; bounds the KV cache."""
    image_root: Path | None = None
    """Folder that pictures in messages may be read from, by path; None: data URLs alone."""
    max_image_pixels: int = Field(DataSection.model_fields["max_image_pixels"].default, ge=784)
    """Larger pictures are scaled down to this; as `data.max_image_pixels` of the run that trained the model."""
    enable_sleep_mode: bool = False
    """Answer /sleep and /wake_up, as vLLM does: every client may then stop it for the others."""


def serve_policy(model_or_run: str, http: HttpSettings, settings: PolicySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        model_or_run: a Hugging Face directory or hub name; or a run's folder or file, which means its final weights.
    Raises:
        DataError: no such model, or no port.
        ConfigError: others than this machine could ask, and there is no token.
    """
    tokens = BearerTokens(http)
    refuse_open_door(http, tokens)
    model, version = find_weights(model_or_run)
    path = Path(model_or_run).expanduser()
    name = settings.name or (path.resolve().name if path.exists() else model_or_run)

    async def run() -> None:
        lifecycle = Lifecycle()
        service = PolicyService(loader(model, version, name, settings))
        app = policy_app(service, lifecycle, http, tokens, may_sleep=settings.enable_sleep_mode)
        await serve(app, service, lifecycle, http, name="policy")

    asyncio.run(run())


def find_weights(model_or_run: str) -> tuple[str, int]:
    """Where the weights are, and how many policy updates have been made to them."""
    path = Path(model_or_run).expanduser()
    if path.suffix in (".yaml", ".yml"):
        path = load_config(path).run_dir
    try:
        folder = RunFolder.read(path)
    except RunFolderError:
        return model_or_run, 0
    if not folder.hf.is_dir():
        raise DataError(
            f"{path}: this run has no final weights yet. Let it finish, or write a checkpoint's with "
            "`hone export RUN.yaml --to FOLDER` and serve that."
        )
    made = folder.identity()
    return str(folder.hf), made["run"]["steps"] if made["stages"][-1] == "rl" else 0


def loader(model: str, version: int, name: str, settings: PolicySettings) -> Callable[[], Policy]:
    """A function that loads the model and makes its engine. Raises DataError when called."""

    def load() -> Policy:
        device = set_up_arithmetic(RunSection(device=settings.device, threads=settings.threads))
        precision = settings.precision
        if precision == "auto":
            precision = "bfloat16" if devices_here(device.type).bfloat16 else "float32"
        template = str(settings.chat_template) if settings.chat_template else None
        place = resolve_model(model, Path.cwd())
        tokenizer = load_tokenizer(ModelSection(path=place, chat_template=template), Path.cwd())
        weights = load_model(place, dtype=getattr(torch, precision), device=device)
        engine = LocalEngine(
            weights,
            decode=tokenizer.decode,
            eos_ids=tokenizer.eos_ids,
            max_concurrent=settings.max_concurrent,
            timeout_s=STEP_TIMEOUT_S,
            version=version,
        )
        on_gpu = is_accelerator(device)

        def held() -> float:
            return module_of(device).memory_allocated(device) if on_gpu else psutil.Process().memory_info().rss

        def move(awake: bool) -> None:
            weights.to(device if awake else "cpu")
            if not awake:
                give_back_memory()

        sees = isinstance(weights, TransformersModel) and weights.vision is not None and tokenizer.processor
        picture = picture_reader(tokenizer.processor, settings) if sees else None
        return Policy(name, engine, tokenizer, weights.max_positions, weights.vocab_size, held, move, picture)

    return load


def picture_reader(files: Mapping[str, str], settings: PolicySettings) -> Callable[[Any], Picture]:
    """A function that reads pictures of messages.

    Args:
        files: of the model's picture processor.
    """
    processor = PictureProcessor.of(files, most_pixels=settings.max_image_pixels)
    root = settings.image_root

    def read(value: Any) -> Picture:
        if root is None and not str(value).startswith("data:"):
            raise BrokenPicture("send a data URL; files are read with --image-root alone, and nothing is fetched")
        return processor.picture(source_of_picture(value, root or Path()))

    return read
