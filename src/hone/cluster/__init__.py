"""Ray: processes of a run on the devices of a cluster. Imports nothing heavy."""
