"""The parts of benchmarks/learning.py."""
