"""HTTP servers of rewards and policies.

`http.py`, `problem.py` and `running.py` are what they share. `reward.py` is the routes of rewards, with `scoring.py`,
`lane.py` and what they need; `policy.py` is the routes of a model.
"""
