"""Models: weights from disk to modules, one decoder for training and sampling, logprobs without full logits."""
