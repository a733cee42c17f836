"""Benchmarks, traces and simulation of kvstore."""
