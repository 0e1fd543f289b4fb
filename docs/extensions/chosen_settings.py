"""The settings that a page shows. It needs no Sphinx, so a test can read the pages."""

import importlib

from treeproc.common.settings import SettingFacts, list_settings


def chosen_settings(argument: str) -> list[SettingFacts]:
    """The settings of a directive `CLASS [SECTION ...] [!SECTION ...]`: of a class or its sections, without those with !."""
    place, *sections = argument.split()
    module, _, name = place.rpartition(".")
    facts = list(list_settings(getattr(importlib.import_module(module), name)))

    def is_in(fact: SettingFacts, names: list[str]) -> bool:
        return any(fact.name == one or fact.name.startswith(f"{one}.") for one in names)

    without = [one.removeprefix("!") for one in sections if one.startswith("!")]
    only = [one for one in sections if not one.startswith("!")] or [fact.name for fact in facts]
    return [fact for fact in facts if is_in(fact, only) and not is_in(fact, without)]
