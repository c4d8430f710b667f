torchrun --standalone --nproc_per_node=1 -m scripts.chat_rl -- --run=default --device_batch_size=8 --num_samples=32 --examples_per_step=32
