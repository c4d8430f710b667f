"""The run file: its keys (`run`), how its layers become one tree (`load`), what must hold across keys (`rules`)."""
