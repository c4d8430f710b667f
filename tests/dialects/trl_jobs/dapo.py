"""A job as its author wrote it: GRPO with TRL's defaults, of which `loss_type` is dapo."""

from checks import begins_with_answer, digits
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="sums.jsonl", split="train")
config = GRPOConfig(
    output_dir="out",
    max_steps=20,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    learning_rate=3e-3,
    reward_weights=[1.0, 0.5],
    shuffle_dataset=False,
    bf16=False,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = GRPOTrainer(
    model="model",
    reward_funcs=[begins_with_answer, digits],
    args=config,
    train_dataset=dataset,
)
trainer.train()
