"""Sandboxes: run untrusted programs and say honestly how each run ended. What output is right is judged outside."""
