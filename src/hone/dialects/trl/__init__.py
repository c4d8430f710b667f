"""TRL: `trl grpo`, its YAML, and `GRPOConfig(...)` in Python. `keys` has the tables, `rules` what they call."""
