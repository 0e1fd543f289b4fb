"""Programs that get a copy of a run while it trains. Each file is a logger of its name, with a class `Logger`."""
