"""Parts that models are composed of."""
