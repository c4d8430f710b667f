"""Configuration schema of a run file: every key with unit, default and meaning; `cluster` and `algorithm` have
files of their own.

Unknown keys are refused and the resolved tree is frozen. `load.py` finds the values, `rules.py` checks keys against
each other, `docs/reference/config.md` is generated from here.
"""

from __future__ import annotations

from typing import Any, Literal

from hone.config.algorithm import AlgorithmSection
from hone.config.cluster import ClusterSection
from hone.config.engine import EngineSection
from hone.config.section import Section, key
from hone.config.source import LastTurn, Sources, TrainSources
from hone.devices import DeviceName


class RunSection(Section):
    dir: str = key("runs/{name}", min_length=1)
    """Folder of everything the run writes; `{name}` is the run's name."""
    name: str | None = key(None, min_length=1)
    """Name of the run in reports, pages and trackers; null: the run file's own, or its folder's for `run.yaml`."""
    group: str | None = key(None, min_length=1)
    """Runs that belong together, such as the seeds of one experiment; shown beside the name, and passed to trackers."""
    tags: tuple[str, ...] = key(())
    """Words to find the run by; shown beside the name, and passed to trackers."""
    steps: int = key(100, unit="policy updates", ge=0)
    """Policy updates of the RL stage."""
    epochs: float | None = key(None, unit="passes over data.train", gt=0)
    """Length of the RL stage in passes over the prompts, in place of `steps`; null: `steps`."""
    threads: int = key(0, unit="CPU threads", ge=0, le=1024)
    """Threads for computation; 0: all cores available to the process."""
    device: DeviceName = key("auto")
    """Device of the policy; auto: the accelerator that torch finds, else the CPU. cuda: GPUs of NVIDIA and AMD; npu:
    Ascend's, with torch_npu."""
    devices: tuple[int, ...] | None = key(None, unit="GPU numbers")
    """GPUs for training, as indices into CUDA_VISIBLE_DEVICES; null: all that no service uses."""
    precision: Literal["auto", "float32", "bfloat16"] = key("auto")
    """Compute dtype of forward and backward; auto: bfloat16 on devices that have it, float32 on CPUs. float32 on GPUs
    multiplies in TF32. Master weights, optimizer and reductions are always float32."""
    fused_kernels: bool | None = key(None)
    """Compile norms, rotary positions, SwiGLU and passes over logits into fused kernels (needs Triton and a C compiler,
    on CPUs a C++ compiler); they round otherwise. null: on GPUs of NVIDIA and AMD where both are there."""
    deterministic: bool = key(False)
    """Trainers on GPUs add up in a fixed order, so that the same batch gives the same update to the last bit and a run
    on Hone's own engine resumes exactly; slower, above all with long sequences. CPUs always do."""

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """`precision`; what is still `auto` is a CPU's."""
        return "float32" if self.precision == "auto" else self.precision


class ModelSection(Section):
    path: str | None = key(None, is_path=True)
    """Hugging Face model: a local directory or a hub name. Exactly one of `path` and `init`."""
    init: dict[str, Any] | None = key(None)
    """Random initialisation from an architecture config: the keys of a config.json, including `model_type`."""
    override: dict[str, Any] = key({})
    """Keys of the config.json in `path` that are replaced, such as `{max_position_embeddings: 65536}`; nested ones are
    merged. Exported models have them."""
    tokenizer: str | None = key(None, is_path=True)
    """Tokenizer directory or hub name; null: the one in `path`."""
    characters: str | None = key(None)
    """Character-level tokenizer over these characters, for small experiments with `init`."""
    chat_template: str | None = key(None, is_path=True)
    """Jinja file with the chat template; null: the tokenizer's own."""
    trust_remote_code: bool = key(False)
    """Run Python code shipped with the model. Weights are read from safetensors only, in any case."""
    implementation: Literal["auto", "hone", "transformers"] = key("auto")
    """auto: Hone's own decoder for Llama, Mistral, Qwen2 and Qwen3, Transformers' class for the rest."""
    freeze: tuple[Literal["vision"], ...] = key(("vision",))
    """Parts that are not trained. A frozen vision tower computes a picture once for the whole run; `[]` trains it."""


class DataSection(Section):
    train: TrainSources = key(..., is_path=True)
    """Prompts to train on: a .jsonl, .json, .csv (each also .gz) or .parquet file, a pattern such as `train-*.jsonl`, a
    folder that `save_to_disk` made, or a Hugging Face dataset name. A list: the rows of all; an entry is such text, or
    a mapping with a `path` and keys of its own, such as `weight`. Named twice, a source counts twice."""
    train_split: str = key("train")
    """Split of Hugging Face datasets; not used for files."""
    train_rows: str | None = key(None)
    """Rows to use, `start:stop` as in Python, of all sources together; null: all."""
    eval: Sources = key(None, is_path=True)
    """Prompts to evaluate on, as `train`; every row is used, so sources have no weights. null: no evaluation."""
    eval_split: str = key("test")
    """Split of a Hugging Face dataset for evaluation."""
    eval_rows: str | None = key(None)
    """Rows to evaluate on, `start:stop`; null: all."""
    prompt_column: str = key("prompt")
    """Column with the prompt: text, or a list of {role, content} messages. Nested fields have dotted
    names such as `reward_model.ground_truth`, in every key that names a column."""
    image_columns: tuple[str, ...] = key(())
    """Columns with pictures, with `chat`: a path, a data URL, bytes, or a list of them. They stand where the text says
    `<image>` or messages have image parts, else in front of the first user message."""
    image_root: str | None = key(None)
    """Folder that paths of pictures start from, and must stay in; null: the run file's."""
    max_image_pixels: int = key(1_003_520, unit="pixels", ge=784)
    """Larger pictures are scaled down to this, or to the model's own limit if that is lower; a side has at least one
    token."""
    answer_column: str | None = key(None)
    """Column with the gold answer, passed to rewards; null: none."""
    id_column: str | None = key(None)
    """Column with a stable id; null: a hash of prompt and answer."""
    template: str | None = key(None)
    """Prompt template such as "Q: {prompt}\\nA:"; any column may be used in braces. Excludes `chat`."""
    chat: bool = key(False)
    """Apply the tokenizer's chat template, with a generation prompt."""
    template_args: dict[str, Any] = key({})
    """Arguments of the chat template, such as `{enable_thinking: false}`; they become its defaults, also in the
    exported tokenizer, so that training, evaluation and serving render alike."""
    last_turn: LastTurn = key("prompt")
    """For messages that end with the assistant's: `answer` removes that message from the prompt and uses it as the gold
    answer unless `answer_column` is set; `prompt` refuses such rows, because their prompts would contain the answer."""
    system: str | None = key(None)
    """System message to prepend, with `chat`."""
    order: Literal["shuffled", "source", "ascending", "descending", "pass_rate"] = key("shuffled")
    """Order of the training rows in each epoch. `shuffled`: by (seed, epoch); `source`: as in the files; `ascending`
    and `descending`: a curriculum by the number in `order_column`; `pass_rate`: first rows not yet sampled and rows
    whose last pass rate is within `pass_rate_bounds`, then a quarter of the others."""
    order_column: str | None = key(None)
    """Column with a number, such as a difficulty, for `order` ascending or descending; equal ones are shuffled."""
    pass_rate_bounds: tuple[float, float] = key((0.0, 1.0), unit="fraction of samples")
    """With `order` pass_rate: a row is within bounds while the share of its samples that reach `eval.threshold` lies
    between these, both excluded; (0, 1): neither always wrong nor always right."""
    max_prompt_tokens: int = key(1024, unit="tokens", ge=1)
    """Maximum tokens of a prompt; `too_long` says what happens to longer ones."""
    too_long: Literal["drop", "left", "middle"] = key("drop")
    """Longer prompts are dropped and counted, or lose tokens at their beginning (left) or in their middle."""
    max_bad_rows: int = key(0, unit="rows", ge=0)
    """Malformed rows of a source that are skipped and counted; one more ends the run. 0: the first does."""


class RewardComponent(Section):
    use: str = key(..., min_length=1, is_path=True)
    """A built-in name, `package.module:function`, or `file.py:function`."""
    name: str | None = key(None)
    """Name in metrics; null: the last part of `use`."""
    weight: float = key(1.0)
    """Weight of the component in the reward."""
    reads: Literal["response", "answer"] = key("response")
    """What the reward sees as a sample's text: the whole response, or what follows the model's reasoning."""
    args: dict[str, Any] = key({})
    """Keyword arguments for the reward."""
    timeout_s: float = key(10.0, unit="seconds per group", gt=0)
    """A scorer that takes longer is killed and replaced, and the samples are unscored. For rewards that score one
    response at a time, such as `math`, the timeout is per response."""


class RewardSection(Section):
    components: tuple[RewardComponent, ...] = key((), min_length=0)
    """The rewards; their weighted sum is what the policy maximises."""
    workers: int = key(1, unit="processes", ge=1, le=4096)
    """Worker processes for Python rewards given by path."""
    min_valid_per_group: int = key(2, unit="samples", ge=1)
    """A group with fewer scored samples is dropped and replaced."""
    max_unscored_frac: float = key(0.05, unit="fraction of samples", ge=0, le=1)
    """The run ends (exit code 3) when more samples than this are unscored over the last 20 steps."""


class ServiceSection(Section):
    reward: str | None = key(None, is_path=True)
    """Serve the rewards of this file, as `hone serve reward` does. Exactly one of `reward`, `policy` and `command`."""
    policy: str | None = key(None, is_path=True)
    """Serve this model, a directory or hub name, as `hone serve policy` does."""
    command: tuple[str, ...] | None = key(None, min_length=1, is_path=True)
    """Program to run in the run file's folder, as a list of words; {port} is replaced by the port."""
    devices: tuple[int, ...] = key((), unit="GPU numbers")
    """GPUs of the service, as indices into CUDA_VISIBLE_DEVICES; it sees no others."""
    env: dict[str, str] = key({})
    """Environment variables of the service, besides those of the run's process."""
    port: int = key(0, ge=0, le=65535)
    """Port on 127.0.0.1; 0: a free one, kept across restarts."""
    health: str = key("/health")
    """Path that answers 2xx once the service is ready."""
    start_timeout_s: float = key(900.0, unit="seconds", gt=0)
    """Maximum start-up time; a service that is not ready by then ends the run (exit code 3)."""
    silence_timeout_s: float = key(120.0, unit="seconds", gt=0)
    """A service whose `health` does not respond for this long is killed and restarted."""
    restarts: int = key(3, unit="restarts per hour", ge=0)
    """Maximum restarts per hour; after that the run ends with a checkpoint (exit code 3)."""
    stop_timeout_s: float = key(15.0, unit="seconds", gt=0)
    """Time between SIGTERM and SIGKILL."""
    engine: EngineSection | None = key(None)
    """How the model of `policy` is held and batched; null: Hone's own server with its defaults."""


class EnvironmentSection(Section):
    use: str | None = key(None, is_path=True)
    """Multi-turn environment, `file.py:Class` or `package.module:Class`; null: single-turn responses."""
    args: dict[str, Any] = key({})
    """Keyword arguments for the environment."""
    max_turns: int = key(8, unit="turns per sample", ge=1)
    """Maximum turns; `rollout.max_response_tokens` bounds the tokens of all turns together."""
    timeout_s: float = key(10.0, unit="seconds per turn", gt=0)
    """An environment that takes longer is killed, and its samples are unscored."""


class RolloutSection(Section):
    group_size: int = key(8, unit="samples per prompt", ge=1)
    """Samples drawn for each prompt (G)."""
    max_response_tokens: int = key(256, unit="tokens", ge=1)
    """Maximum tokens after the prompt, environment text included; longer responses finish with `length`."""
    temperature: float = key(1.0, gt=0)
    """Sampling temperature, also applied to the trainer's logprobs."""
    top_k: int = key(0, unit="tokens", ge=0)
    """Sample from the k most likely tokens; 0: off."""
    top_p: float = key(1.0, gt=0, le=1)
    """Nucleus sampling: the smallest set of tokens with at least this probability; 1: off."""
    min_p: float = key(0.0, ge=0, lt=1)
    """Minimum probability relative to the most likely token; 0: off."""
    stop: tuple[str, ...] = key(())
    """Stop strings; a response ends with the first one, which is kept."""
    stop_token_ids: tuple[int, ...] = key(())
    """Stop tokens besides the tokenizer's EOS."""
    max_concurrent_samples: int = key(512, unit="sequences", ge=1)
    """Maximum sequences decoded together by an engine."""
    kv_cache_tokens: int | None = key(None, unit="tokens", ge=1)
    """Maximum tokens in the KV cache of Hone's own engine; the newest samples wait where it is full. null: what samples
    in flight need at their longest, within half of the device's memory."""
    prefill_tokens: int = key(16384, unit="tokens", ge=1)
    """Maximum prompt tokens per prefill pass (at least one prompt); changes memory, not results."""
    compile: bool = key(False)
    """Compile the layers between attentions (Hone's decoder; needs Triton or a C++ compiler): for long runs."""
    max_staleness: int = key(0, unit="policy updates", ge=0)
    """Maximum updates between sampling a token and training on it. 0: on-policy; 1: sampling overlaps training."""
    timeout_s: float = key(600.0, unit="seconds per group", gt=0)
    """A group that takes longer ends the run with an error."""
    environment: EnvironmentSection = key(EnvironmentSection())
    """Multi-turn environment."""


class OptimizerSection(Section):
    lr: float = key(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = key((0.9, 0.95))
    """AdamW's betas."""
    eps: float = key(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = key(0.0, ge=0)
    """Decoupled weight decay; not applied to norms, biases and vectors."""
    grad_clip: float = key(1.0, ge=0)
    """Maximum global gradient norm; 0: off."""
    schedule: Literal["constant", "linear", "cosine"] = key("constant")
    """Learning rate schedule after warm-up."""
    warmup_steps: int = key(0, unit="optimizer steps", ge=0)
    """Linear warm-up from 0."""
    warmup_frac: float = key(0.0, unit="fraction of the optimizer steps", ge=0, le=1)
    """Warm-up as a fraction of all optimizer steps, rounded up; with `warmup_steps` = 0."""
    final_lr_frac: float = key(0.0, unit="fraction of lr", ge=0, le=1)
    """Final learning rate of a linear or cosine schedule."""


Checkpointing = Literal["none", "selective", "full"] | int
"""What is recomputed in the backward pass; see `train.activation_checkpointing`."""


class TrainSection(Section):
    prompts_per_step: int = key(32, unit="prompts", ge=1)
    """Prompts per policy update (P)."""
    samples_per_optimizer_step: int | None = key(None, unit="samples", ge=1)
    """Samples per optimizer step; null: P x G, one optimizer step per update."""
    passes_per_batch: int = key(1, unit="passes", ge=1)
    """Passes over the batch in each update."""
    tokens_per_microbatch: int = key(16384, unit="tokens", ge=1)
    """Maximum tokens per forward pass, prompt tokens counted once per group; changes memory, not results."""
    logprob_chunk_tokens: int = key(1024, unit="tokens", ge=1)
    """Tokens per chunk of logits; changes memory, not results."""
    activation_checkpointing: Checkpointing = key("none")
    """Recompute activations in the backward pass: all but matrix products (selective), whole layers (full), or those of
    the first N layers alone (a number); changes memory, not results."""
    optimizer: OptimizerSection = key(OptimizerSection())
    """The policy's optimizer."""


class LoraSection(Section):
    rank: int = key(0, ge=0)
    """Rank of the adapter; 0: train all weights."""
    alpha: float = key(32.0, gt=0)
    """The adapter is scaled by alpha / rank."""
    start: str | None = key(None, is_path=True)
    """Directory of an adapter in peft's format to start from, in the first stage that trains one; its rank, alpha and
    targets must be these. The reference of a KL is its base model. null: a new adapter."""
    targets: tuple[str, ...] | None = key(None, min_length=1)
    """Linear layers to adapt, by the last part of their names, such as q_proj; null: all but the output layer."""
    stages: tuple[Literal["sft", "rl"], ...] = key(("sft", "rl"), min_length=1)
    """Stages that train an adapter, a new one each, merged at the end; other stages train all weights."""
    publish: Literal["merged", "adapter"] = key("merged")
    """What engines are sent: weights with the adapter merged, or the adapter alone, which vLLM puts beside the model
    that it started from."""


class CriticSection(Section):
    path: str | None = key(None, is_path=True)
    """With `credit: gae`: model or reward model to initialise the critic from; null: the policy's weights."""
    value_clip: float | None = key(0.2, unit="reward", gt=0)
    """Value clipping in the critic's loss: maximum change per update; null: off."""
    warmup_updates: int = key(0, unit="policy updates", ge=0)
    """Initial updates of the critic alone; they count towards run.steps."""
    optimizer: OptimizerSection = key(OptimizerSection(lr=1e-5))
    """The critic's optimizer and schedule; it makes as many optimizer steps as the policy."""


class SftSection(Section):
    data: Sources = key(None, is_path=True)
    """Training data, as `data.train` without weights; null: `data.train` itself. Uses `data`'s columns and template
    where a source has none of its own."""
    rows: str | None = key(None)
    """Rows to use, `start:stop`; null: all."""
    response_column: str | None = key(None)
    """Column with the target response; null: the gold answer."""
    messages_column: str | None = key(None)
    """Column with whole conversations, rendered by the chat template; the assistant's turns are the targets."""
    epochs: float = key(1.0, unit="passes over the rows", gt=0)
    """Epochs."""
    rows_per_step: int = key(64, unit="rows", ge=1)
    """Rows per optimizer step."""
    optimizer: OptimizerSection = key(OptimizerSection(lr=1e-5))
    """Optimizer and schedule of the stage."""


class PreferenceSection(Section):
    chosen_column: str = key("chosen")
    """Column with the chosen response: text, or with `data.chat` also a list of messages."""
    rejected_column: str = key("rejected")
    """Column with the rejected response."""
    margin_column: str | None = key(None)
    """Column with the margin between the scores, in logits; null: 0."""
    epochs: float = key(1.0, unit="passes over the pairs", gt=0)
    """Epochs. Pairs come from `data.train`, held-out pairs from `data.eval`, the optimizer from `train`."""
    pairs_per_step: int = key(64, unit="pairs", ge=1)
    """Pairs per optimizer step."""


class EvalSection(Section):
    every: int = key(0, unit="policy updates", ge=0)
    """Updates between evaluations; 0: only before the first and after the last update."""
    before_training: bool = key(True)
    """Evaluate before the first update."""
    samples: int = key(1, unit="samples per prompt", ge=1)
    """Samples per prompt."""
    temperature: float = key(1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_k: int | None = key(None, unit="tokens", ge=0)
    """Sample from the k most likely tokens; null: `rollout.top_k`."""
    top_p: float | None = key(None, gt=0, le=1)
    """Nucleus sampling; null: `rollout.top_p`."""
    pass_k: tuple[int, ...] = key((1,))
    """Values of k for the unbiased pass@k estimate, at most `samples`."""
    by: str | None = key(None)
    """Column of the evaluation data to report accuracy by."""
    threshold: float = key(1.0)
    """Minimum reward of a correct sample."""


class CheckpointSection(Section):
    every: int = key(50, unit="policy updates", ge=0)
    """Updates between checkpoints; 0: only at the end of a stage and when stopped."""
    keep: int = key(2, unit="checkpoints", ge=1)
    """Number of checkpoints to keep."""
    best: str | None = key(None)
    """Evaluation metric such as eval/accuracy; the checkpoint where it is highest is kept and exported to hf-best/."""
    export_precision: Literal["float32", "bfloat16", "float16"] = key("float32")
    """Number format of exported weights: hf/, hf-best/, and what one stage leaves to the next; float32 is exact."""


class ObserveSection(Section):
    console: Literal["auto", "live", "plain", "quiet"] = key("auto")
    """Console output; auto: a live view on a terminal, plain lines elsewhere."""
    tensorboard: bool = key(True)
    """Write TensorBoard event files."""
    wandb: str | None = key(None)
    """Weights & Biases project; null: off. The key comes from WANDB_API_KEY."""
    swanlab: str | None = key(None)
    """SwanLab project; null: off. Without SWANLAB_API_KEY it is written into the run's folder, for `swanlab sync`."""
    trackio: str | None = key(None)
    """Trackio project on this machine, for `trackio show`; null: off."""
    mlflow: str | None = key(None)
    """MLflow experiment; null: off. MLFLOW_TRACKING_URI names its server; without it a database in the run's folder."""
    samples_max_mib: float = key(64.0, unit="MiB, compressed", ge=0)
    """Maximum size of samples/; recording then stops with a message. 0: no recording."""
    samples_step_tokens: int | None = key(1_000_000, unit="tokens", ge=1)
    """Response tokens recorded of a step: of a larger one, groups spread evenly over it, at least one. null: all."""
    tracker_samples: int = key(0, unit="samples per step", ge=0)
    """Samples that trackers and TensorBoard are given as a table at each update; 0: none leaves the run's folder."""
    trace: bool = key(True)
    """Write trace.json, for Perfetto."""
    stop_on: tuple[str, ...] = key(())
    """Alarms that end the run with a checkpoint; docs/reference/alarms.md has their names."""


class PlanSection(Section):
    memory_budget_gib: float | None = key(None, unit="GiB", gt=0)
    """Memory budget of the run on its device, on a CPU of resident memory; null: all."""
    autotune: bool = key(False)
    """Raise concurrency and the token budget while less than 75 % of the memory is used; lower them above 85 %."""


class GateSection(Section):
    enabled: bool = key(True)
    """Compare the logprobs of sampler and trainer before the first update."""
    max_logprob_gap: float | None = key(None, unit="nats", gt=0)
    """Maximum mean |trainer - sampler| logprob without a known cause; null: 0.2 before the first update, and later
    three times what was measured then. A known cause (temperature, shift, other prompts or weights) stops the run."""


StageName = Literal["sft", "reward_model", "rl"]


class RunConfig(Section):
    """The resolved run file."""

    seed: int = key(0, ge=0)
    """Random seed; no random choice depends on arrival order."""
    stages: tuple[StageName, ...] = key(("rl",), min_length=1)
    """Stages in order: `sft` supervised fine-tuning, `rl` reinforcement learning, `reward_model` (last) preferences."""
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
