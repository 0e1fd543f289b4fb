"""Tree-structured attention: shards to batches to models to scores, and a library of the same parts.

What the library offers is loaded when it is asked for: `import treenet` alone loads neither PyTorch nor NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treeproc import __version__
from treeproc.common.errors import importing

if TYPE_CHECKING:
    from treenet.api.modules import TreeAttention, TreeEncoder, TreeStates
    from treenet.api.run import ClassifierRun, Run, from_pretrained, load_run
    from treenet.api.shards import Shards, read_shards
    from treenet.config import ModelConfig, TreeAttentionConfig
    from treenet.data.batch import collate
    from treenet.structure import TreeCollator, TreeStructure
    from treeproc.common.errors import UserError

_PLACES = {
    "ClassifierRun": "treenet.api.run",
    "ModelConfig": "treenet.config",
    "Run": "treenet.api.run",
    "Shards": "treenet.api.shards",
    "TreeAttention": "treenet.api.modules",
    "TreeAttentionConfig": "treenet.config",
    "TreeCollator": "treenet.structure",
    "TreeEncoder": "treenet.api.modules",
    "TreeStates": "treenet.api.modules",
    "TreeStructure": "treenet.structure",
    "UserError": "treeproc.common.errors",
    "collate": "treenet.data.batch",
    "from_pretrained": "treenet.api.run",
    "load_run": "treenet.api.run",
    "read_shards": "treenet.api.shards",
}

__all__ = [
    "ClassifierRun",
    "ModelConfig",
    "Run",
    "Shards",
    "TreeAttention",
    "TreeAttentionConfig",
    "TreeCollator",
    "TreeEncoder",
    "TreeStates",
    "TreeStructure",
    "UserError",
    "__version__",
    "collate",
    "from_pretrained",
    "load_run",
    "read_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'treenet' has no attribute {name!r}")
    with importing():
        return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
