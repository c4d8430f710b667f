"""What a run lets people see: metrics, samples, trace, console view and report. Imports neither torch nor numpy."""
