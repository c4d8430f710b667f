"""Sampling from the policy: the engine protocol and the engines that implement it."""
