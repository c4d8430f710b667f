"""Rewards by rule: mathematics, choices, formats, lengths, repetition, patterns and schemas.

`answer` extracts a response's final answer; every other module is one rule or a few of a kind, listed in
`hone.config.rewards`. Each declares its range. A rule whose computation a response can make endless runs in a process
that can be killed, and scores such a response as a fault of the model.
"""
