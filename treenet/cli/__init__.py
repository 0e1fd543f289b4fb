"""The commands. `tree-attention COMMAND` runs them, and so do the scripts of the same names in `workflows/`."""
