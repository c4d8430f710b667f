"""Hone: RL post-training for language models. Start at `hone --help` or docs/architecture.md."""

__version__ = "0.1.0"
