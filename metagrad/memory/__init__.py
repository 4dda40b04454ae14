"""Memory of every inner and outer step: `MemoryTracker`, `Record`, and `current()` for the open tracker."""

from metagrad.memory.report import Record
from metagrad.memory.tracker import MemoryTracker, current

__all__ = ["MemoryTracker", "Record", "current"]
