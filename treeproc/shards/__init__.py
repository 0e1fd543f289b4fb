"""The shard format: schema, Arrow files, writer, index and memory-mapped reader."""
