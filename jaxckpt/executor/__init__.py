"""Explicit forward and backward passes by a list of actions."""
