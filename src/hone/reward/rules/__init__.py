"""Rewards by rule: mathematics, choices, formats, lengths, repetition, patterns and schemas.

`answer` finds where a response answers, `settings` checks a rule's arguments; every other module is one rule or a few
of a kind. Names of a run file lead here through `hone.reward.builtin`. Each declares its range, and each that can be
made to compute without end says that this is the response's fault and runs where it can be killed.
"""
