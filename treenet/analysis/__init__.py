"""Analyses of trained models: statistics of attention, of decoder and encoder, and word alignments."""
