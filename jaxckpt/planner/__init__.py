"""Optimal plans under a byte budget: inside a stage, and across stages."""
