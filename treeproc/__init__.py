"""Raw text to trees to Arrow tables: readers, parsers, subwords and the shard format."""

__version__ = "1.0.0"  # of the distribution tree-attention: pyproject.toml and treenet read it here
