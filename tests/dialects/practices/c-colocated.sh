# All models on the same eight GPUs, and the critic with the reward model besides.
python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 8 --vllm_tensor_parallel_size 1 \
   --colocate_all_models --colocate_critic_reward \
   --vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --deepspeed_enable_sleep \
   --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
   --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k \
   --save_path checkpoint/llama3-8b-rlhf \
   --micro_train_batch_size 8 --train_batch_size 128 \
   --micro_rollout_batch_size 16 --rollout_batch_size 1024 \
   --n_samples_per_prompt 1 --num_episodes 1 --max_epochs 1 \
   --prompt_max_len 1024 --generate_max_len 1024 --max_samples 100000 \
   --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \
   --init_kl_coef 0.01 --kl_target 6.0 --eps_clip_low_high 0.2 0.28 \
   --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template \
   --normalize_reward --gradient_checkpointing --packing_samples
