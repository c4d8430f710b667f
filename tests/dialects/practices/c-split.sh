# A 70B on 48 GPUs: 16 for engines, 16 for the policy, 16 for the critic. Reference and reward model are not sized.
python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_nodes 2 --actor_num_gpus_per_node 8 \
   --critic_num_nodes 2 --critic_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 4 \
   --pretrain meta-llama/Llama-3.1-70B-Instruct \
   --reward_pretrain meta-llama/Llama-3.1-70B-Instruct \
   --save_path checkpoint/llama3-70b-rlhf \
   --train_batch_size 128 --rollout_batch_size 1024 --n_samples_per_prompt 1 --num_episodes 1 \
   --prompt_max_len 1024 --generate_max_len 1024 --max_samples 100000 \
   --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \
   --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template \
   --gradient_checkpointing --packing_samples --adam_offload
