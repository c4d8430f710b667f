"""Memory of a training step, operator by operator, on fake tensors: no GPU, no weights, no time."""
