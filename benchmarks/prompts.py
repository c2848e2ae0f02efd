"""Beginnings of Python files, written for the benchmarks in the style of ordinary modules.

The embedded models have never seen them, every machine has the same ones, and none begins as another does, so that no cached
beginning can be reused.
"""

from __future__ import annotations

RECORDS = '''import argparse
import json
from pathlib import Path


def read_records(path):
    """Yield one record per line of a JSON lines file."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def write_records(path, records):
    """Write one record per line and return how many there were."""
    count = 0
    with open(path, "w", encoding="utf-8") as lines:
        for record in records:
'''

QUEUE = '''class BoundedQueue:
    """A first-in, first-out queue that holds at most `capacity` items."""

    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self._items = []

    def __len__(self):
        return len(self._items)

    def __iter__(self):
        return iter(self._items)

    def __repr__(self):
        return f"{type(self).__name__}({self._items!r}, capacity={self.capacity})"

    @property
    def full(self):
        return len(self._items) >= self.capacity

    def put(self, item):
        """Add an item at the end; raise IndexError when the queue is full."""
'''

MATRIX = '''"""Small helpers for matrices held as lists of rows."""

from __future__ import annotations

import math


def zeros(rows: int, columns: int) -> list[list[float]]:
    return [[0.0] * columns for _ in range(rows)]


def transpose(matrix: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*matrix)]


def add(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(row, other)] for row, other in zip(left, right)]


def multiply(left: list[list[float]], right: list[list[float]]) -> list[list[float]]:
    """The matrix product; raises ValueError if the inner sizes differ."""
'''

CONFIGURATION = '''# Settings of the report generator, with their defaults.
import os
import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = 3


@dataclass
class ServerConfig:
    host: str = "localhost"
    port: int = 8080
    timeout: float = DEFAULT_TIMEOUT
    retries: int = DEFAULT_RETRIES
    headers: dict = field(default_factory=dict)

    @classmethod
    def from_environment(cls, prefix="REPORT_"):
        """Read every setting from an environment variable, or keep its default."""
        config = cls()
        host = os.environ.get(prefix + "HOST")
        if host is not None:
            config.host = host
        port = os.environ.get(prefix + "PORT")
        if port is not None:
'''

TESTS = """import unittest

from shapes import Circle, Rectangle, Square


class TestRectangle(unittest.TestCase):
    def setUp(self):
        self.rectangle = Rectangle(3, 4)

    def test_area(self):
        self.assertEqual(self.rectangle.area(), 12)

    def test_perimeter(self):
        self.assertEqual(self.rectangle.perimeter(), 14)

    def test_negative_width_is_refused(self):
        with self.assertRaises(ValueError):
            Rectangle(-1, 4)


class TestSquare(unittest.TestCase):
    def setUp(self):
        self.square = Square(5)

    def test_area(self):
"""

PYTHON = (RECORDS, QUEUE, MATRIX, CONFIGURATION, TESTS)
