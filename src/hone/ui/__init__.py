"""`hone ui`: pages of runs in a browser, live."""
