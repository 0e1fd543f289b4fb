"""MLflow and Weights & Biases: a run is sent there while it trains."""
