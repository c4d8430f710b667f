"""The loops that turn prompts into a better model: `policy` (RL), `sft` (imitation), and what they stand on."""
