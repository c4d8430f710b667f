"""Servers: what is used in process, over HTTP. `http.py`, `problem.py` and `running.py` are what they share; each other file is one of them."""
