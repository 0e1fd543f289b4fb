"""Raw lines to encoded rows, for translation."""
