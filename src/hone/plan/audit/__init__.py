"""A foreign recipe's settings and claims about memory, each checked with the planner's arithmetic."""
