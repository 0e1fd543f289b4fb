"""Examples of shards, the plan of batches, and padded batches."""
