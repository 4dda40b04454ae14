"""Memory of every inner and outer step: `MemoryTracker`, its `Record`, and `current()`, the open tracker.

`keep_freed_memory` has glibc keep what is freed.
"""

from metagrad.memory.allocator import keep_freed_memory
from metagrad.memory.report import Record
from metagrad.memory.tracker import MemoryTracker, current

__all__ = ["MemoryTracker", "Record", "current", "keep_freed_memory"]
