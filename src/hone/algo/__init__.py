"""RL algorithms: pure functions on flat ragged tensors, and the rows that combine them. No I/O, no model."""
