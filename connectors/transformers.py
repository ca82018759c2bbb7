"""Hugging Face transformers on kvtide's arena, block tables and kernels; the models are the library's own, unmodified.

    cache = KvtideCache(model, memory="4GiB")              any number of `generate` calls share it
    model.generate(**inputs, cache=cache)                  (before transformers 5.24: past_key_values=cache)

`KvtideCache` serves `generate`: prefixes are found again, rows that do not fit take turns, a store can stand behind it.
`PagedModel` is what an engine with a scheduler of its own calls: one step of any rows through the model. Full
attention, sliding windows, soft caps, sink logits, MLA (latents, absorbed) and gated delta nets are served, for
inference. Needs transformers 5; the names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvtide.kvcache import ConfigError, MissingExtra

if TYPE_CHECKING:
    from .transformers_bridge.cache import CacheStats, KvtideCache
    from .transformers_bridge.model import PagedModel, model_layout, weights_digest

_HOMES = {
    "CacheStats": "transformers_bridge.cache",
    "KvtideCache": "transformers_bridge.cache",
    "PagedModel": "transformers_bridge.model",
    "model_layout": "transformers_bridge.model",
    "weights_digest": "transformers_bridge.model",
}

__all__ = ["CacheStats", "KvtideCache", "PagedModel", "model_layout", "weights_digest"]


def check_version() -> None:
    """`MissingExtra` without transformers, `ConfigError` with one before version 5."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("kvtide.connectors.transformers", "transformers", "transformers") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"transformers {transformers.__version__} is installed; kvtide.connectors.transformers needs version 5 or "
            'later: pip install "transformers>=5"'
        )


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    return getattr(import_module(f".{home}", __package__), name)


def __dir__() -> list[str]:
    return __all__
