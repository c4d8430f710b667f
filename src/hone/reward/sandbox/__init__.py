"""Sandboxes: run untrusted programs and report how each run ended. Outputs are compared outside of them."""
