"""Servers: what is used in process, over HTTP. `http.py` is what they share; each other file is one of them."""
