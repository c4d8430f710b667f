"""Trainers: the microbatch routine, the local trainer, its optimizer, and checkpoints."""
