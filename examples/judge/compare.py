"""What the tiny judge is shown, and so what it learns from: the right answer above the one to score, digit on digit."""

WIDTH = 8


def construct_inputs(question, response, reference=None):
    """The judge's prompt. `response` has at most WIDTH characters, as `rollout.max_response_tokens` bounds it."""
    return f"{reference:>{WIDTH}}\n{response:>{WIDTH}}\n"
