"""Tracing: values, residuals, work, and names for chosen values of a program."""
