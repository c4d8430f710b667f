"""`hone serve`: rewards and policies over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hone.cli.arguments import Overrides, examples
from hone.config.load import load_config

if TYPE_CHECKING:
    from pydantic import BaseModel

POLICY_PORT = 8000
"""Default port of a policy, the one of vLLM; not that of a reward service."""

T = TypeVar("T", bound="BaseModel")

app = typer.Typer(
    name="serve",
    help="Serve rewards or a policy over HTTP. SIGTERM drains.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

REWARD_EXAMPLES = examples(
    "hone serve reward run.yaml --port 8899",
    "hone serve reward rewards.yaml --host 0.0.0.0 --token-file tokens.txt",
    "hone serve reward rewards.yaml reward.workers=8 --warm-up item.json",
)

POLICY_EXAMPLES = examples(
    "hone serve policy runs/judge/hf --port 8000",
    "hone serve policy runs/gsm8k --name gsm8k",
    "hone serve policy Qwen/Qwen3-0.6B --precision bfloat16 --max-concurrent 32",
)

HostOption = Annotated[str | None, typer.Option(help="Address to listen on; other than loopback needs a token.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0: a free one.")]
TokenEnv = Annotated[str | None, typer.Option(help="Environment variable with accepted bearer tokens.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with accepted bearer tokens, one per line; reloaded on change.")
]
OpenMetrics = Annotated[bool | None, typer.Option("--open-metrics", help="Serve /metrics without a token.")]
AllowedHost = Annotated[
    list[str] | None, typer.Option(help="Name besides localhost that requests, and web pages, may use; repeatable.")
]
MaxBodyMib = Annotated[float | None, typer.Option(help="Maximum request body, in MiB.")]
DrainTimeout = Annotated[float | None, typer.Option(help="Time for requests in flight after SIGTERM, in seconds.")]


@app.command("reward", epilog=REWARD_EXAMPLES)
def reward(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A run file, or a file with a reward section.")],
    overrides: Overrides = None,
    host: HostOption = None,
    port: Port = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allowed_host: AllowedHost = None,
    open_metrics: OpenMetrics = None,
    max_body_mib: MaxBodyMib = None,
    drain_timeout_s: DrainTimeout = None,
    warm_up: Annotated[
        Path | None, typer.Option(help="JSON file with an item to score before the service is ready.")
    ] = None,
    max_items: Annotated[int | None, typer.Option(help="Maximum items per request.")] = None,
    max_solution_kib: Annotated[int | None, typer.Option(help="Maximum response length, in KiB.")] = None,
    queue_items: Annotated[
        int | None, typer.Option(help="Maximum items waiting or being scored; more are rejected.")
    ] = None,
    client_items: Annotated[int | None, typer.Option(help="Maximum items per client; 0: no limit.")] = None,
    max_wait_s: Annotated[
        float | None, typer.Option(help="Maximum expected wait; requests beyond it are rejected.")
    ] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Default deadline of a request.")] = None,
    batch_items: Annotated[int | None, typer.Option(help="Maximum batch of a reward model.")] = None,
    batch_wait_ms: Annotated[float | None, typer.Option(help="Batching window.")] = None,
    cache_items: Annotated[int | None, typer.Option(help="Size of the score cache.")] = None,
    cache_ttl_s: Annotated[float | None, typer.Option(help="Time that a score stays in the cache, in seconds.")] = None,
    allow_request_weights: Annotated[
        bool | None, typer.Option("--allow-request-weights", help="Allow weights in requests to /compute_reward.")
    ] = None,
    unscored_constant: Annotated[
        float | None, typer.Option(help="Score of /get_reward and /slime for unscored items; default: status 503.")
    ] = None,
) -> None:
    """Serve the rewards of a file."""
    loaded = load_config(file, overrides or (), needed="reward")
    from hone.serve.http import HttpSettings
    from hone.serve.reward import run
    from hone.serve.scoring import ScoringSettings

    http = given(
        HttpSettings,
        host=host,
        port=port,
        token_env=token_env,
        token_file=token_file,
        allowed_hosts=allowed_host,
        open_metrics=open_metrics,
        max_body_mib=max_body_mib,
        drain_timeout_s=drain_timeout_s,
    )
    settings = given(
        ScoringSettings,
        max_items=max_items,
        max_solution_kib=max_solution_kib,
        queue_items=queue_items,
        client_items=client_items,
        max_wait_s=max_wait_s,
        timeout_s=timeout_s,
        batch_items=batch_items,
        batch_wait_ms=batch_wait_ms,
        cache_items=cache_items,
        cache_ttl_s=cache_ttl_s,
        allow_request_weights=allow_request_weights,
        unscored_constant=unscored_constant,
    )
    run(loaded, http, settings, warm_up=warm_up)


@app.command("policy", epilog=POLICY_EXAMPLES)
def policy(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="Model directory, hub name, or a run's folder or file.")
    ],
    host: HostOption = None,
    port: Port = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allowed_host: AllowedHost = None,
    max_body_mib: MaxBodyMib = None,
    drain_timeout_s: DrainTimeout = None,
    name: Annotated[
        str | None, typer.Option(help="Model name in requests; default: the last part of its path.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file with the chat template; default: the tokenizer's own.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0: all available cores.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Samples decoded together.")] = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder that pictures in messages may be read from; default: data URLs alone.")
    ] = None,
    max_image_pixels: Annotated[int | None, typer.Option(help="Larger pictures are scaled down to this.")] = None,
    enable_sleep_mode: Annotated[
        bool | None, typer.Option("--enable-sleep-mode", help="Enable /sleep and /wake_up, as in vLLM.")
    ] = None,
) -> None:
    """Serve a model through OpenAI's completions and chat completions."""
    from hone.assemble.policy_server import PolicySettings, serve_policy
    from hone.serve.http import HttpSettings

    http = given(
        HttpSettings,
        host=host,
        port=POLICY_PORT if port is None else port,
        token_env=token_env,
        token_file=token_file,
        allowed_hosts=allowed_host,
        max_body_mib=max_body_mib,
        drain_timeout_s=drain_timeout_s,
    )
    settings = given(
        PolicySettings,
        name=name,
        chat_template=chat_template,
        device=device,
        precision=precision,
        threads=threads,
        max_concurrent=max_concurrent,
        image_root=image_root,
        max_image_pixels=max_image_pixels,
        enable_sleep_mode=enable_sleep_mode,
    )
    serve_policy(model, http, settings)


def given(settings: type[T], **options: Any) -> T:
    """Settings with the given options; defaults are the settings' own."""
    from pydantic import ValidationError

    try:
        return settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise typer.BadParameter(f"{first['msg']} (got {first['input']!r})", param_hint=option) from None
