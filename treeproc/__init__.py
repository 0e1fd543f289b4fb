"""Raw text to trees to Arrow tables: readers, parsers, subwords and the shard format."""
