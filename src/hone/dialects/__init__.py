"""Foreign configurations, of verl, OpenRLHF, TRL, MindSpeed-RL and prime-rl, read as text and translated to run files.

Nothing of a foreign file is executed: a shell script is expanded as far as it is static, Python is read as syntax.
"""
