"""Rewards of the jobs, in a file of their own."""


def said(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def begins_with_answer(completions, answer, **kwargs):
    """How many characters of the answer a completion begins with, of those that it has."""
    found = []
    for completion, gold in zip(completions, answer, strict=True):
        text = said(completion)
        found.append(sum(a == b for a, b in zip(text, gold, strict=False)) / len(gold))
    return found


def digits(completions, **kwargs):
    """Share of even digits."""
    return [sum(c in "02468" for c in said(text)) / (len(said(text)) + 1) for text in completions]
