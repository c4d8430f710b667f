"""Memory and time of a run, worked out before anything starts: closed forms, no torch, well under a second."""
