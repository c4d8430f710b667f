"""From rows to prompts: sources, templates, tokens, and packing samples for training."""
