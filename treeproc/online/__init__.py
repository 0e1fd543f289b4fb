"""Raw lines to encoded rows, as translation needs them."""
