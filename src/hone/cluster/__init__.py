"""Processes beside the run: its services, started, watched, restarted and ended. Imports nothing heavy."""
