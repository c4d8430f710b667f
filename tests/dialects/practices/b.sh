#!/bin/bash
# Starts the reward server on GPU 7, waits for it, and trains on GPUs 0 to 6; both logs are followed.
cd "$(dirname "$0")"
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567

CUDA_VISIBLE_DEVICES=7 nohup python reward_server.py --port 8899 > reward_server.log 2>&1 &
SERVER=$!
trap "kill $SERVER" EXIT
until curl -sf http://localhost:8899/health > /dev/null; do
    sleep 5
done

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=data/posters/train.parquet \
    data.val_files=data/posters/test.parquet \
    data.train_batch_size=56 \
    data.max_prompt_length=4096 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=56 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    custom_reward_function.path=reward_client.py \
    custom_reward_function.name=compute_score \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=7 \
    trainer.total_epochs=1 2>&1 | tee training.log &
tail -f reward_server.log training.log
