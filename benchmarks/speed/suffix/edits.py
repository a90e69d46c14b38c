"""Edits that repeat: a file, the file after one edit, the next edit asked for, and its result.

Every edit is a list of replacements, so the result a capable model would write is known. The files
were written for this benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["EditPrompt", "edit_prompts"]

COUNTER = '''class Counter:
    """Counts events by name."""

    def __init__(self, names):
        self.names = list(names)
        self.counts = {name: 0 for name in names}
        self.total = 0

    def add(self, name, amount=1):
        """Add amount to the count of name."""
        if name not in self.counts:
            raise KeyError(name)
        self.counts[name] += amount
        self.total += amount

    def share(self, name):
        """Return the share of name in all events."""
        if self.total == 0:
            return 0.0
        return self.counts[name] / self.total

    def merge(self, other):
        """Add the counts of another counter."""
        for name in other.names:
            self.add(name, other.counts[name])
'''

READER = '''def read_table(path, separator=","):
    """Read a table whose first line names the columns."""
    with open(path, encoding="utf-8") as file:
        header = file.readline().strip().split(separator)
        rows = [line.strip().split(separator) for line in file]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path}, line {number}: {len(row)} columns")
    return header, rows


def column_of(path, name, separator=","):
    """Read one column of a table."""
    header, rows = read_table(path, separator)
    index = header.index(name)
    return [row[index] for row in rows]


def write_table(path, header, rows, separator=","):
    """Write a table with its header."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(separator.join(header) + "\\n")
        for row in rows:
            file.write(separator.join(row) + "\\n")
'''

QUEUE = '''import threading


class JobQueue:
    """Jobs that wait for a worker, the oldest first."""

    def __init__(self, max_jobs=100):
        self.max_jobs = max_jobs
        self.jobs = []
        self.lock = threading.Lock()

    def put(self, job):
        """Queue a job; False when there is no room."""
        with self.lock:
            if len(self.jobs) >= self.max_jobs:
                return False
            self.jobs.append(job)
            return True

    def take(self):
        """Take the oldest job; None when there is none."""
        with self.lock:
            if not self.jobs:
                return None
            return self.jobs.pop(0)

    def cancel(self, job):
        """Remove a job that still waits."""
        with self.lock:
            if job in self.jobs:
                self.jobs.remove(job)
'''

SHAPES = """import math


class Circle:
    def __init__(self, radius):
        self.radius = radius

    def area(self):
        return math.pi * self.radius**2

    def scaled(self, factor):
        return Circle(self.radius * factor)


class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def scaled(self, factor):
        return Rectangle(self.width * factor, self.height * factor)


def total_area(shapes):
    return sum(shape.area() for shape in shapes)


def largest(shapes):
    return max(shapes, key=lambda shape: shape.area())
"""

Replacements = dict[str, str]
"""Every old text is replaced by its new one, in order."""
Edit = tuple[str, Replacements]
"""What is asked for, and what does it."""

COUNTER_EDITS: tuple[Edit, ...] = (
    ("call the events labels", {"name": "label"}),
    ("start counting at one", {": 0 for": ": 1 for"}),
    ("count in floats", {"amount=1": "amount=1.0", "self.total = 0": "self.total = 0.0"}),
    ("call the total size", {"total": "size"}),
)
READER_EDITS: tuple[Edit, ...] = (
    ("separate columns by tabs", {'","': '"\\t"'}),
    ("call the separator delimiter", {"separator": "delimiter"}),
    ("count lines from one", {"start=2": "start=1"}),
    ("read and write ASCII", {'"utf-8"': '"ascii"'}),
)
QUEUE_EDITS: tuple[Edit, ...] = (
    ("call jobs tasks", {"job": "task"}),
    ("take the newest first", {"pop(0)": "pop()", "oldest": "newest"}),
    ("raise when full", {"return False": "raise OverflowError", "False when": "raises when"}),
    ("use a reentrant lock", {"threading.Lock()": "threading.RLock()"}),
)
SHAPES_EDITS: tuple[Edit, ...] = (
    ("call area surface", {"area": "surface"}),
    ("derive both from Shape", {"Circle:": "Circle(Shape):", "Rectangle:": "Rectangle(Shape):"}),
    ("call the factor scale", {"factor": "scale"}),
    ("measure in floats", {"= radius": "= float(radius)", "= width": "= float(width)"}),
)
FILES: tuple[tuple[str, tuple[Edit, ...]], ...] = (
    (COUNTER, COUNTER_EDITS),
    (READER, READER_EDITS),
    (QUEUE, QUEUE_EDITS),
    (SHAPES, SHAPES_EDITS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditPrompt:
    """Two versions of a file with the edit between them, the next edit, and the third version."""

    prompt: str
    result: str


def edit_prompts() -> list[EditPrompt]:
    """Every file with every pair of edits that follow each other."""
    found = []
    for file, edits in FILES:
        versions = [file]
        for _, replacements in edits:
            versions.append(edited(versions[-1], replacements))
        for number, ((first, _), (second, _)) in enumerate(pairwise(edits)):
            before, between, after = versions[number : number + 3]
            prompt = f"# The file:\n{before}\n# Now {first}:\n{between}\n# Now {second}:\n"
            found.append(EditPrompt(prompt=prompt, result=after))
    return found


def edited(text: str, replacements: Replacements) -> str:
    """Text with every replacement made; one that changes nothing is a mistake."""
    for old, new in replacements.items():
        if old not in text:
            raise ValueError(f"{old!r} is not in the file")
        text = text.replace(old, new)
    return text
