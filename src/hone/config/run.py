"""The whole configuration tree: every key, its unit, default and meaning. Defaults are here and in `cluster.py` only.

A run file is one YAML document of these sections; `docs/reference/config.md` is generated from this file. Unknown keys are
refused, the resolved tree is frozen, and a test proves that every key is read by something. What this file does
not do: find values (`load.py`) or check keys against each other (`rules.py`).
"""

from __future__ import annotations

from typing import Any, Literal

from hone.config.cluster import ClusterSection
from hone.config.section import Section, key


class RunSection(Section):
    dir: str = key("runs/{name}", min_length=1)
    """Folder of everything the run writes; `{name}` is the run file's own name, or its folder's for `run.yaml`."""
    steps: int = key(100, unit="policy updates", ge=0)
    """How many policy updates the RL stage makes."""
    threads: int = key(0, unit="CPU threads", ge=0)
    """Threads for arithmetic; 0 takes every core that this process may use."""
    device: Literal["auto", "cpu", "cuda"] = key("auto")
    """Where the policy lives; auto takes a GPU when torch sees one."""
    devices: tuple[int, ...] | None = key(None, unit="GPU numbers")
    """GPUs for training, counted as CUDA_VISIBLE_DEVICES lists them; null: all that no service has."""
    precision: Literal["float32", "bfloat16"] = key("float32")
    """Arithmetic of forward and backward. Master weights, optimizer and reductions are float32 in both."""


class ModelSection(Section):
    path: str | None = key(None, is_path=True)
    """Hugging Face model: a local directory or a hub name. Exactly one of `path` and `init`."""
    init: dict[str, Any] | None = key(None)
    """Random initialisation from an architecture config: the keys of a config.json, `model_type` among them."""
    tokenizer: str | None = key(None, is_path=True)
    """Tokenizer directory or hub name; null takes the one beside `path`."""
    characters: str | None = key(None)
    """Build a character-level tokenizer of these characters instead; for small experiments with `init`."""
    chat_template: str | None = key(None, is_path=True)
    """Jinja file with the chat template; null takes the tokenizer's own."""
    trust_remote_code: bool = key(False)
    """Run Python code that a model repository ships. Weights are read from safetensors only, in any case."""
    implementation: Literal["auto", "hone", "transformers"] = key("auto")
    """auto: Hone's own decoder for Llama, Mistral, Qwen2 and Qwen3, Transformers' class for the rest."""


class DataSection(Section):
    train: str = key(..., is_path=True)
    """Prompts to train on: a .jsonl, .json, .csv (each also .gz) or .parquet file, a pattern such as `train-*.jsonl`, a
    folder that `save_to_disk` made, or a Hugging Face dataset name."""
    train_split: str = key("train")
    """Split of a Hugging Face dataset; not used for files."""
    train_rows: str | None = key(None)
    """Rows to use, `start:stop` as in Python; null takes all."""
    eval: str | None = key(None, is_path=True)
    """Prompts to evaluate on, as `train`; null: no evaluation."""
    eval_split: str = key("test")
    """Split of a Hugging Face dataset for evaluation."""
    eval_rows: str | None = key(None)
    """Rows to evaluate on, `start:stop`; null takes all."""
    prompt_column: str = key("prompt")
    """Column with the prompt: text, or a list of {role, content} messages. A field inside a column has a dotted name,
    in every key that names a column: `reward_model.ground_truth`."""
    answer_column: str | None = key(None)
    """Column with the gold answer, handed to rewards; null: the data has none."""
    id_column: str | None = key(None)
    """Column with a stable id; null: a hash of prompt and answer."""
    template: str | None = key(None)
    """Plain template such as "Q: {prompt}\\nA:"; any column may be named in braces. Not together with `chat`."""
    chat: bool = key(False)
    """Render through the tokenizer's chat template, with a generation prompt."""
    last_turn: Literal["prompt", "answer"] = key("prompt")
    """Where messages end in the assistant's, `answer` takes that one off the prompt; it is the gold answer unless
    `answer_column` names another. With `prompt`, such rows are refused: their prompts would contain the answer."""
    system: str | None = key(None)
    """System message put first when `chat` is on."""
    shuffle: bool = key(True)
    """A new order per epoch, a function of (seed, epoch) alone."""
    max_prompt_tokens: int = key(1024, unit="tokens", ge=1)
    """Longer prompts are dropped and reported, never cut."""
    on_bad_row: Literal["error", "skip"] = key("error")
    """A malformed row ends the run, or is counted and skipped."""
    max_bad_rows: int = key(100, unit="rows", ge=0)
    """With `skip`: more bad rows than this end the run all the same."""


class RewardComponent(Section):
    use: str = key(..., min_length=1, is_path=True)
    """A built-in name, `package.module:function`, or `file.py:function`."""
    name: str | None = key(None)
    """What metrics call it; null takes the last part of `use`."""
    weight: float = key(1.0)
    """Factor in the weighted sum that is the reward."""
    args: dict[str, Any] = key({})
    """Keyword arguments for the reward."""
    timeout_s: float = key(10.0, unit="seconds per group", gt=0)
    """A scorer that takes longer is killed and replaced; the sample becomes a fault, not a number. Rewards that judge
    one response at a time, `math` among them, have this long for each."""


class RewardSection(Section):
    components: tuple[RewardComponent, ...] = key((), min_length=0)
    """The rewards; their weighted sum is what the policy maximises."""
    workers: int = key(1, unit="processes", ge=1)
    """Killable processes that run Python rewards named by path."""
    min_valid_per_group: int = key(2, unit="samples", ge=1)
    """A group with fewer scored samples is dropped and replaced."""
    max_unscored_frac: float = key(0.05, unit="fraction of samples", ge=0, le=1)
    """The run ends (exit 3) when more than this stays unscored over the last 20 steps' samples."""


class ServiceSection(Section):
    reward: str | None = key(None, is_path=True)
    """Serve the rewards of this file, as `hone serve reward` does. Exactly one of `reward`, `policy` and `command`."""
    policy: str | None = key(None, is_path=True)
    """Serve this model, a directory or hub name, as `hone serve policy` does."""
    engine: dict[str, Any] = key({})
    """How the engine of `policy` holds and batches the model, in vLLM if it is installed: see docs/rewards-judge.md."""
    command: tuple[str, ...] | None = key(None, min_length=1, is_path=True)
    """Run this program, in the run file's folder: its words, in which {port} stands for the port."""
    devices: tuple[int, ...] = key((), unit="GPU numbers")
    """GPUs of its own, counted as CUDA_VISIBLE_DEVICES lists them; it sees no others."""
    port: int = key(0, ge=0, le=65535)
    """Port on 127.0.0.1; 0 takes a free one, which the service keeps when it is started again."""
    health: str = key("/health")
    """Path that answers 2xx once the service is ready."""
    start_timeout_s: float = key(300.0, unit="seconds", gt=0)
    """A service that is not ready by then ends the run (exit 3)."""
    silence_timeout_s: float = key(120.0, unit="seconds", gt=0)
    """A service whose `health` gives no answer at all for so long is killed and started again."""
    restarts: int = key(3, unit="restarts per hour", ge=0)
    """How often it is started again after it ended by itself; once more ends the run, with a checkpoint (exit 3)."""
    stop_timeout_s: float = key(15.0, unit="seconds", gt=0)
    """Time between asking it to stop (SIGTERM) and killing it."""


class EnvironmentSection(Section):
    use: str | None = key(None, is_path=True)
    """What answers the policy's turns: `file.py:Class` or `package.module:Class`; null: a response is one turn."""
    args: dict[str, Any] = key({})
    """Keyword arguments for it."""
    max_turns: int = key(8, unit="turns per sample", ge=1)
    """A sample ends after so many turns; `rollout.max_response_tokens` bounds the tokens of all of them."""
    timeout_s: float = key(10.0, unit="seconds per turn", gt=0)
    """An environment that takes longer to answer is given up; the sample becomes a fault, not a number."""


class RolloutSection(Section):
    group_size: int = key(8, unit="samples per prompt", ge=1)
    """Samples drawn for each prompt (G)."""
    max_response_tokens: int = key(256, unit="tokens", ge=1)
    """A response is cut here, an environment's text included; its finish reason is then `length`."""
    temperature: float = key(1.0, gt=0)
    """Sampling temperature; the trainer's logprobs use the same one."""
    top_k: int = key(0, unit="tokens", ge=0)
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = key(1.0, gt=0, le=1)
    """Sample among the fewest tokens whose probability reaches this; 1 is off."""
    min_p: float = key(0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    stop: tuple[str, ...] = key(())
    """A response ends when its text contains one of these; the text is kept up to and including it."""
    stop_token_ids: tuple[int, ...] = key(())
    """A response ends with one of these tokens; the tokenizer's EOS always does."""
    max_concurrent_samples: int = key(512, unit="sequences", ge=1)
    """Sequences decoded together by an engine; bounds its KV cache."""
    prefill_tokens: int = key(16384, unit="tokens", ge=1)
    """Prompt tokens that an engine computes at one time, one prompt at least; memory, never the result."""
    compile: bool = key(False)
    """Compile what stands between two attentions, with Triton or a C++ compiler (Hone's decoder): for long runs."""
    max_staleness: int = key(0, unit="policy updates", ge=0)
    """Updates allowed between sampling a token and training on it. 0 is on-policy; 1 overlaps both."""
    timeout_s: float = key(600.0, unit="seconds per group", gt=0)
    """A group that takes longer ends the run with a message; nothing waits for ever."""
    environment: EnvironmentSection = key(EnvironmentSection())
    """A tool or a world that the policy meets turn by turn."""


class AlgorithmSection(Section):
    credit: Literal[
        "group_norm",
        "group_mean",
        "leave_one_out",
        "group_mean_whitened",
        "length_weighted",
        "best_of_group",
        "remax",
        "reinforce_pp",
        "gae",
    ] = key("group_norm")
    """How rewards become advantages. remax samples each prompt once more, greedily; gae learns a `critic`."""
    gamma: float = key(1.0, unit="per token", gt=0, le=1)
    """Discount of a later token's reward; environments' tokens are no steps."""
    gae_lambda: float = key(0.95, unit="per token", ge=0, le=1)
    """With `credit: gae`: 0 trusts the critic one token ahead, 1 only rewards."""
    ratio: Literal["token", "sequence", "none"] = key("token")
    """What the policy ratio is taken over."""
    clip: Literal["ppo", "cispo", "geo_mean", "sapo", "clip_cov", "none"] = key("ppo")
    """How the ratio is bounded."""
    clip_low: float = key(0.2, ge=0, lt=1)
    """The ratio is kept above 1 - clip_low."""
    clip_high: float = key(0.2, ge=0)
    """The ratio is kept below 1 + clip_high."""
    dual_clip: float | None = key(None, gt=1)
    """With `clip: ppo`, a negative advantage counts at most this many times over; null is off."""
    sapo_tau: tuple[float, float] = key((1.0, 1.05))
    """With `clip: sapo`, steepness of the soft gate for positive and negative advantages."""
    clip_cov: tuple[float, float, float] = key((2e-4, 1.0, 5.0))
    """With `clip: clip_cov`: share of tokens to take out, and between which covariances of logprob and advantage."""
    old_logprobs: Literal["trainer", "sampler"] = key("trainer")
    """What the ratio is taken to: the trainer's policy before the update, or the policy as it was sampled from, which
    saves a pass and makes the clip bound staleness and mismatch too."""
    correction: Literal["auto", "none", "tis", "sequence_tis", "icepop", "sequence_mask"] = key("auto")
    """Importance weight of tokens on which trainer and sampler differ: truncated, or dropped outside the bounds. auto:
    tis where `rollout.max_staleness` > 0 and old logprobs are the trainer's, else none."""
    correction_low: float = key(0.5, ge=0)
    """Weights (icepop) or samples (sequence_mask) below this are dropped."""
    correction_high: float = key(2.0, gt=0)
    """Weights are cut here (tis, sequence_tis, sequence_mask), or dropped above it (icepop; sequence_mask: samples)."""
    aggregate: Literal["token_mean", "sample_mean", "fixed_length", "token_sum"] = key("sample_mean")
    """How token losses become one number, always by counts over the whole optimizer step."""
    kl_loss_coef: float = key(0.0, ge=0)
    """Weight of the KL to the frozen reference, in the loss; 0 needs no reference."""
    kl_reward_coef: float = key(0.0, unit="reward per nat", ge=0)
    """Weight of each token's KL to the frozen reference, taken from its reward; 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = key("k3")
    """Per-token estimator of that KL; k1 has zero expected gradient in a loss and is refused there."""
    kl_clip: float | None = key(10.0, unit="nats", gt=0)
    """Each token's estimate is kept within +- this, in loss and reward; beyond it has no gradient. null is off."""
    kl_target: float | None = key(None, unit="nats, by kl_target_unit", gt=0)
    """Steer the one KL coefficient that is set so that the KL stays here; null keeps the coefficient."""
    kl_target_unit: Literal["per_token", "per_sequence"] = key("per_token")
    """Whether `kl_target` is of a token or of a whole response."""
    kl_horizon_samples: int = key(10_000, unit="samples", ge=1)
    """Samples in which a KL 20% or more off its target changes the coefficient by about 20%."""
    reference_refresh_every: int = key(0, unit="policy updates", ge=0)
    """The policy becomes its own reference every so many updates; 0 keeps the one of the start."""
    entropy_coef: float = key(0.0)
    """Weight of the entropy bonus."""
    reward_clip: tuple[float, float] | None = key(None)
    """Raw rewards are kept in [low, high], before any baseline."""
    advantage_clip: float | None = key(None, unit="as the credit's", gt=0)
    """Advantages are kept within +- this, last of all; null is off."""
    truncated_reward_factor: float = key(1.0, ge=0, le=1)
    """What a response cut at the length limit keeps of a positive reward; 1 is off."""
    normalize_rewards: bool = key(False)
    """Take the running mean of all rewards so far from each and divide by their standard deviation."""
    overlong_buffer_frac: float = key(0.0, unit="fraction of rollout.max_response_tokens", ge=0, le=1)
    """DAPO's soft length penalty applies to the last part of the limit, this share of it; 0 is off."""
    overlong_penalty: float = key(1.0, unit="reward", ge=0)
    """Penalty at the limit; grows linearly over the buffer."""
    drop_uninformative: bool = key(False)
    """Replace groups whose rewards are all equal by new prompts (DAPO's dynamic sampling)."""
    max_dropped_per_kept: float = key(10.0, unit="groups", gt=0)
    """With `drop_uninformative`: end the run when a step drops more groups than this for each one it needs."""


class OptimizerSection(Section):
    lr: float = key(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = key((0.9, 0.95))
    """AdamW's decay rates of the first and second moment."""
    eps: float = key(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = key(0.0, ge=0)
    """Decoupled weight decay; not applied to norms, biases and vectors."""
    grad_clip: float = key(1.0, ge=0)
    """Largest global gradient norm; 0 is off."""
    schedule: Literal["constant", "linear", "cosine"] = key("constant")
    """Course of the learning rate after warm-up."""
    warmup_steps: int = key(0, unit="optimizer steps", ge=0)
    """The learning rate rises linearly from 0 over these."""
    final_lr_frac: float = key(0.0, unit="fraction of lr", ge=0, le=1)
    """Where a linear or cosine schedule ends."""


class TrainSection(Section):
    prompts_per_step: int = key(32, unit="prompts", ge=1)
    """Prompts whose groups make one policy update (P)."""
    samples_per_optimizer_step: int | None = key(None, unit="samples", ge=1)
    """Samples per optimizer step; null: the whole update (P x G), one optimizer step."""
    passes_per_batch: int = key(1, unit="passes", ge=1)
    """Times that an update goes over its batch."""
    tokens_per_microbatch: int = key(16384, unit="tokens", ge=1)
    """Tokens of one forward pass, prompt tokens counted once per group; memory, never the result."""
    logprob_chunk_tokens: int = key(1024, unit="tokens", ge=1)
    """Tokens whose logits exist at one time; memory, never the result."""
    activation_checkpointing: Literal["none", "selective", "full"] = key("none")
    """Recompute in the backward pass instead of storing: all but products of matrices, or whole layers; memory, never
    the result."""
    optimizer: OptimizerSection = key(OptimizerSection())
    """The policy's optimizer."""


class LoraSection(Section):
    rank: int = key(0, ge=0)
    """Train a low-rank adapter beside frozen weights instead of the weights; 0: train the weights."""
    alpha: float = key(32.0, gt=0)
    """The adapter's product counts alpha / rank times."""
    targets: tuple[str, ...] | None = key(None, min_length=1)
    """Linear layers that get one, by the last part of their names, such as q_proj; null: all but the output layer."""
    stages: tuple[Literal["sft", "rl"], ...] = key(("sft", "rl"), min_length=1)
    """Stages that train an adapter, each a new one, merged at its end; the others train every weight."""


class CriticSection(Section):
    path: str | None = key(None, is_path=True)
    """With `credit: gae`: a model or reward model directory to start the critic from; null: the policy's weights."""
    value_clip: float | None = key(0.2, unit="reward", gt=0)
    """An update moves a value at most so far from what it was, as far as its loss is concerned; null is off."""
    warmup_updates: int = key(0, unit="policy updates", ge=0)
    """First updates in which only the critic learns; they count among run.steps."""
    optimizer: OptimizerSection = key(OptimizerSection(lr=1e-5))
    """Its own optimizer and schedule; optimizer steps are as many as the policy's."""


class SftSection(Section):
    data: str | None = key(None, is_path=True)
    """Rows to imitate, as `data.train`; null takes `data.train` itself. Uses `data`'s columns and template."""
    rows: str | None = key(None)
    """Rows to use, `start:stop`; null takes all."""
    response_column: str | None = key(None)
    """Column with the text to imitate after the prompt; null takes the gold answer."""
    messages_column: str | None = key(None)
    """Column with whole conversations to imitate the assistant's turns of, through the chat template; null: none."""
    epochs: float = key(1.0, unit="passes over the rows", gt=0)
    """How long to train."""
    rows_per_step: int = key(64, unit="rows", ge=1)
    """Rows per optimizer step."""
    optimizer: OptimizerSection = key(OptimizerSection(lr=1e-5))
    """Its own optimizer and schedule."""


class PreferenceSection(Section):
    chosen_column: str = key("chosen")
    """Column with the better response: text, or with `data.chat` also a list of messages."""
    rejected_column: str = key("rejected")
    """Column with the worse one."""
    margin_column: str | None = key(None)
    """Column with the least difference wanted between their scores, in logits; null: 0."""
    epochs: float = key(1.0, unit="passes over the pairs", gt=0)
    """How long to train. Pairs are `data.train`'s, those held out `data.eval`'s, the optimizer is `train`'s."""
    pairs_per_step: int = key(64, unit="pairs", ge=1)
    """Pairs per optimizer step."""


class EvalSection(Section):
    every: int = key(0, unit="policy updates", ge=0)
    """Evaluate every so many updates with the live engine; 0: only before the first and after the last."""
    samples: int = key(1, unit="samples per prompt", ge=1)
    """Samples per prompt."""
    temperature: float = key(1.0, ge=0)
    """0 is greedy."""
    pass_k: tuple[int, ...] = key((1,))
    """k of the unbiased pass@k estimates; none above `samples`."""
    by: str | None = key(None)
    """Column of the evaluation data; every value of it gets an accuracy of its own."""
    threshold: float = key(1.0)
    """A sample counts as correct when its reward reaches this."""


class CheckpointSection(Section):
    every: int = key(50, unit="policy updates", ge=0)
    """Save every so many updates; 0: only at the end of a stage and when stopped."""
    keep: int = key(2, unit="checkpoints", ge=1)
    """Older ones are removed once a newer one is whole."""
    best: str | None = key(None)
    """Evaluation metric, such as eval/accuracy: the step where it is highest is kept too, and exported to hf-best/."""


class ObserveSection(Section):
    console: Literal["auto", "live", "plain", "quiet"] = key("auto")
    """auto: a live view on a terminal, plain lines elsewhere."""
    tensorboard: bool = key(True)
    """Write TensorBoard event files."""
    wandb: str | None = key(None)
    """Weights & Biases project to log to; null is off. The key comes from WANDB_API_KEY."""
    samples_max_mib: float = key(64.0, unit="MiB, compressed", ge=0)
    """Most that samples/ may hold; recording then stops and says so. 0 records nothing."""
    trace: bool = key(True)
    """Write trace.json, for Perfetto."""


class PlanSection(Section):
    memory_budget_gib: float | None = key(None, unit="GiB", gt=0)
    """Memory that the run may take of its device, on a CPU as resident memory of its process; null: all there is."""
    autotune: bool = key(False)
    """Raise concurrency and the token budget while less than 75 % of the memory is used, and step back above 85 %."""


class GateSection(Section):
    enabled: bool = key(True)
    """Check before the first update that sampler and trainer agree."""
    max_logprob_gap: float | None = key(None, unit="nats", gt=0)
    """Largest mean |trainer - sampler| logprob; null: 1e-3 in float32, 3e-2 in bfloat16."""


Stage = Literal["sft", "reward_model", "rl"]


class RunConfig(Section):
    """The resolved run file."""

    seed: int = key(0, ge=0)
    """Every random choice is a function of it and of what is being chosen, never of arrival order."""
    stages: tuple[Stage, ...] = key(("rl",), min_length=1)
    """What to run, in order: `sft` imitates, `rl` is the policy loop; `reward_model` learns from preferences, last."""
    run: RunSection = key(RunSection())
    model: ModelSection = key(...)
    data: DataSection = key(...)
    reward: RewardSection = key(RewardSection())
    services: dict[str, ServiceSection] = key({})
    cluster: ClusterSection = key(ClusterSection())
    rollout: RolloutSection = key(RolloutSection())
    algorithm: AlgorithmSection = key(AlgorithmSection())
    train: TrainSection = key(TrainSection())
    lora: LoraSection = key(LoraSection())
    critic: CriticSection = key(CriticSection())
    sft: SftSection = key(SftSection())
    rm: PreferenceSection = key(PreferenceSection())
    eval: EvalSection = key(EvalSection())
    checkpoint: CheckpointSection = key(CheckpointSection())
    observe: ObserveSection = key(ObserveSection())
    gate: GateSection = key(GateSection())
    plan: PlanSection = key(PlanSection())
