"""Observability: metrics, samples, trace, console and report. Imports neither torch nor numpy."""
