"""The command line: arguments only, one thin file per verb. Nothing here imports torch before a verb needs it."""
