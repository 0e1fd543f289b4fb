"""The commands: one file each, run by `tree-attention COMMAND` and by the scripts of the same names in `workflows/`."""
