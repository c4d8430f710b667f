"""`hone serve`: what is used in process, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hone.cli.arguments import Overrides, examples
from hone.config.load import load_rewards

if TYPE_CHECKING:
    from pydantic import BaseModel

POLICY_PORT = 8000
"""Where a policy listens unless told otherwise: beside a reward service, and where OpenAI's clients look for vLLM."""

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

Host = Annotated[str | None, typer.Option(help="Address to listen on; others than this machine's own need a token.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
TokenEnv = Annotated[str | None, typer.Option(help="Environment variable with the bearer tokens that are accepted.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with bearer tokens, one a line; read again on change.")]
OpenMetrics = Annotated[bool | None, typer.Option("--open-metrics", help="Answer /metrics without a token.")]
AllowedHost = Annotated[
    list[str] | None, typer.Option(help="Name besides localhost that requests, and web pages, may use; repeatable.")
]
MaxBodyMib = Annotated[float | None, typer.Option(help="Largest body of a request, in MiB.")]
DrainTimeout = Annotated[float | None, typer.Option(help="For requests in flight after SIGTERM, in seconds.")]


@app.command("reward", epilog=REWARD_EXAMPLES)
def reward(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A run file, or a file with a reward section.")],
    overrides: Overrides = None,
    host: Host = None,
    port: Port = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allowed_host: AllowedHost = None,
    open_metrics: OpenMetrics = None,
    max_body_mib: MaxBodyMib = None,
    drain_timeout_s: DrainTimeout = None,
    warm_up: Annotated[Path | None, typer.Option(help="JSON file with an item to score before it is ready.")] = None,
    max_items: Annotated[int | None, typer.Option(help="Items of one request.")] = None,
    max_solution_kib: Annotated[int | None, typer.Option(help="Longest response that is scored, in KiB.")] = None,
    queue_items: Annotated[int | None, typer.Option(help="Items waiting or being scored; more are refused.")] = None,
    client_items: Annotated[int | None, typer.Option(help="The same for one client; 0: no such limit.")] = None,
    max_wait_s: Annotated[float | None, typer.Option(help="Requests that would wait longer are refused.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of requests without their own.")] = None,
    batch_items: Annotated[int | None, typer.Option(help="Items that a model looks at together.")] = None,
    batch_wait_ms: Annotated[float | None, typer.Option(help="How long the first of them waits.")] = None,
    cache_items: Annotated[int | None, typer.Option(help="Scores that are remembered.")] = None,
    cache_ttl_s: Annotated[float | None, typer.Option(help="How long.")] = None,
    allow_request_weights: Annotated[
        bool | None, typer.Option("--allow-request-weights", help="Let /compute_reward bring weights.")
    ] = None,
    unscored_constant: Annotated[
        float | None, typer.Option(help="What /get_reward and /slime answer for what cannot be scored; else 503.")
    ] = None,
) -> None:
    """Serve the rewards of a file."""
    loaded = load_rewards(file, overrides or ())
    from hone.serve.http import HttpSettings
    from hone.serve.reward import run
    from hone.serve.settings import ScoringSettings

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
    host: Host = None,
    port: Port = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    allowed_host: AllowedHost = None,
    max_body_mib: MaxBodyMib = None,
    drain_timeout_s: DrainTimeout = None,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; else the last part of its path.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file, instead of the tokenizer's own.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="For arithmetic; 0: every core that it may use.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Samples decoded together.")] = None,
    enable_sleep_mode: Annotated[
        bool | None, typer.Option("--enable-sleep-mode", help="Answer /sleep and /wake_up, as vLLM does.")
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
        enable_sleep_mode=enable_sleep_mode,
    )
    serve_policy(model, http, settings)


def given(settings: type[T], **options: Any) -> T:
    """Settings with the options that were given; defaults are the settings' own."""
    from pydantic import ValidationError

    try:
        return settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise typer.BadParameter(f"{first['msg']} (got {first['input']!r})", param_hint=option) from None
