"""Who owns which block now: the hybrid memory manager, drafts and thinking budgets."""

from .accounting import MemoryByCause
from .cache import Evicted, Pin
from .drafts import DraftAccounting, DraftCounts
from .events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from .hashing import Item
from .manager import HybridMemoryManager
from .planner import fits
from .plans import Admission, Copy, Reservation
from .thinking import Forcing, ThinkingBudget, ThinkingMarkers

__all__ = [
    "Admission",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Copy",
    "DraftAccounting",
    "DraftCounts",
    "Evicted",
    "Forcing",
    "HybridMemoryManager",
    "Item",
    "KvEvent",
    "MemoryByCause",
    "Pin",
    "Reservation",
    "ThinkingBudget",
    "ThinkingMarkers",
    "fits",
]
