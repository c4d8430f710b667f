"""The run folder and what is done with it: check before, status during, audit after."""
