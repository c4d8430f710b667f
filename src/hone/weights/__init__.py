"""Weights from the trainer to the engines: buckets, transports, publishing."""
