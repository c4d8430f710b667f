"""HTTP servers of rewards and of a policy.

Shared: `http.py`, `problem.py`, `running.py`. Rewards: `reward.py` (routes), `scoring.py` (requests), `queue.py`.
Policy: `policy_app.py` (routes), `policy.py` (requests).
"""
