"""Print a script with which bash completes commands, options, settings and the names of shipped configurations.

    tree-attention completion > ~/.local/share/bash-completion/completions/tree-attention

The script holds all words, so that a press of the tab key starts no program. Print it again after an upgrade.
"""

import argparse
from pkgutil import resolve_name

from treenet.cli.main import COMMANDS
from treenet.cli.shipped import shipped_names
from treeproc.common.command_line import ArgumentParser, command
from treeproc.common.errors import PROGRAM
from treeproc.common.setting_facts import list_settings

# After `=`, and where no word fits, bash completes names of files.
_SCRIPT = """\
_tree_attention() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
    COMPREPLY=()
    if [[ $current == = || $previous == = ]]; then
        return
    elif (( COMP_CWORD == 1 )); then
        words="{commands} --help --version"
    elif [[ $previous == --config || ${{COMP_WORDS[1]}} == configs ]]; then
        words="{configs}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ ${{COMPREPLY[0]}} == *[=.] ]]; then compopt -o nospace 2> /dev/null; fi
}}
complete -o default -F _tree_attention {program}
"""


def words_of(name: str) -> list[str]:
    """Return the options and the settings of a command as they are typed."""
    parser = resolve_name(COMMANDS[name][0]).parser()
    # The user chooses the name of an entry of a dict.
    settings = [key.partition("NAME")[0] if "NAME" in key else f"{key}=" for key, *_ in list_settings(parser.settings)]
    return [*sorted(parser.options()), *dict.fromkeys(settings)]


@command(lambda: ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
def main(args: argparse.Namespace) -> None:
    cases = "\n".join(f'            {name}) words="{" ".join(words_of(name))}" ;;' for name in COMMANDS)
    names = " ".join(COMMANDS), " ".join(shipped_names())
    print(_SCRIPT.format(commands=names[0], configs=names[1], cases=cases, program=PROGRAM), end="")
