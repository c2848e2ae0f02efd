"""Benchmarks: ``python -m benchmarks SUITE``.

Every suite measures both sides in one process, interleaved, after a warm-up of each, and writes one JSON document per run: command,
versions, commit, settings, every raw figure, then what follows from them. What fails is recorded as a failure and makes the exit
code 1; it never borrows another's time.
"""
