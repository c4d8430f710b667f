"""verl: Hydra overrides of `verl.trainer.main_ppo` and its relatives. `keys` has the tables, `rules` what they call."""
