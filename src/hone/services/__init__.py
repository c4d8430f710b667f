"""Processes of a run file's `services`, without Ray: started, watched, restarted and ended. Imports nothing heavy."""
