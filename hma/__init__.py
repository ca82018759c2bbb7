"""Who owns which block now: the hybrid memory manager, drafts and thinking budgets."""

from .drafts import DraftAccounting
from .hashing import Item
from .manager import Admission, Copy, HybridMemoryManager, Reservation
from .thinking import ThinkingBudget

__all__ = [
    "Admission",
    "Copy",
    "DraftAccounting",
    "HybridMemoryManager",
    "Item",
    "Reservation",
    "ThinkingBudget",
]
