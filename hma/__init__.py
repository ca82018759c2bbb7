"""Who owns which block now: the hybrid memory manager, drafts and thinking budgets."""

from .drafts import DraftAccounting, DraftCounts
from .hashing import Item
from .manager import Admission, Copy, HybridMemoryManager, Reservation
from .thinking import Forcing, ThinkingBudget, ThinkingMarkers

__all__ = [
    "Admission",
    "Copy",
    "DraftAccounting",
    "DraftCounts",
    "Forcing",
    "HybridMemoryManager",
    "Item",
    "Reservation",
    "ThinkingBudget",
    "ThinkingMarkers",
]
