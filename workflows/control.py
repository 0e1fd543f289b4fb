"""`tree-attention control` as a script of a checkout, which `ray job submit` runs; the command is in treenet/cli."""

from treenet.cli.main import run_script

if __name__ == "__main__":
    run_script(__file__)
