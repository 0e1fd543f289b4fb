"""`tree-attention control` as a script of a checkout, which `ray job submit` runs; the command is in treenet/cli."""

from treenet.cli.control import main
from treeproc.common.command_line import run_cli

if __name__ == "__main__":
    run_cli(main)
