"""Rewards by rule: mathematics, choices, formats, lengths, repetition, patterns and schemas.

`answer` finds where a response answers; every other module is one rule or a few of a kind, named in the table of
`hone.config.rewards`. Each declares its range. One whose computation a response can make endless declares that as a
fault of the model, and runs in a killable process.
"""
