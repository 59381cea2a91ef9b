"""The cache for models of Hugging Face transformers: needs the extra ``transformers``.

Importing this module registers the attention ``lowbit`` if the extra is installed.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["LowbitCache", "register"]


def _missing(reason: str) -> Any:
    def refuse(*args: object, **options: object) -> NoReturn:
        raise ImportError(f"the cache needs torch and transformers 5 ({reason}): pip install 'lowbit[transformers]'")

    return refuse


try:
    from .torch_attention import register
    from .torch_model_cache import LowbitCache
except ImportError as error:
    LowbitCache = register = _missing(str(error))  # type: ignore[misc]
else:
    register()
