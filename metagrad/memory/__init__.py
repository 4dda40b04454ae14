"""Memory of every inner and outer step: `MemoryTracker`, its `Record`, and `current()`, the open tracker."""

from metagrad.memory.report import Record
from metagrad.memory.tracker import MemoryTracker, current

__all__ = ["MemoryTracker", "Record", "current"]
