"""Sampling: the engine, the models it runs, the server in front of it."""
