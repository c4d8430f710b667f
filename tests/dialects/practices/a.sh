#!/usr/bin/env bash
# A generative reward model (DeepSeek-GRM-16B) on the trainer's GPUs: 8 x A100-80G.
set -x
JUDGE=${JUDGE:-BBQGod/DeepSeek-GRM-16B}
MAX_PROMPT=1024
MAX_RESPONSE=15000

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.train_batch_size=128 \
    data.max_prompt_length=$MAX_PROMPT \
    data.max_response_length=$MAX_RESPONSE \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    reward_model.enable=True \
    reward_model.model.path=$JUDGE \
    reward_model.micro_batch_size_per_gpu=32 \
    reward_model.rollout.tensor_model_parallel_size=1 \
    reward_model.rollout.gpu_memory_utilization=0.3 \
    reward_model.rollout.max_num_seqs=128 \
    reward_model.rollout.max_num_batched_tokens=50000 \
    reward_model.rollout.enable_chunked_prefill=True \
    reward_model.rollout.prompt_length=16024 \
    reward_model.rollout.response_length=1500 \
    reward_model.rollout.max_model_len=17000 \
    reward_model.sampling_config.temperature=0.0 \
    reward_model.data_processor_config.path=grm.py \
    reward_model.data_processor_config.preprocess_fn_name=construct_inputs \
    reward_model.data_processor_config.postprocess_fn_name=convert_output \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.save_freq=20 \
    trainer.total_epochs=2
