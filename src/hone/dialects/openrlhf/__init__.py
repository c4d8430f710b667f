"""OpenRLHF: flags of `openrlhf.cli.train_ppo_ray`. `keys` has the tables, `rules` what they call."""
