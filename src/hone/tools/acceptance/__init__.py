"""`make gpu`: the acceptance run of a GPU machine. What each figure means is in docs/gpu-acceptance.md."""
