"""Processes, files, restarts and user code: what every package may use. Imports nothing heavy."""
