"""YAML 1.2 from anybody: numbers, texts, lists and keys, nothing that is built, and no more of it than a configuration needs."""

import copy
import re
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import yaml
from yaml.constructor import ConstructorError

from treeproc.common.errors import UserError, quoted

MOST_BYTES = 1 << 20
# Tokens that end where their text does. Others end where the next text begins.
_WRITTEN = (yaml.ScalarToken, yaml.AliasToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)
_MOST_DEPTH = 40
_MOST_VALUES = 50_000  # with those that stand for an alias


class _Yaml12Loader(yaml.SafeLoader):
    """YAML 1.2 core schema: `5e-4` is a number, `no` and `off` are strings, duplicate keys are errors.

    Tags of other types are refused, and so are documents that are nested too deep or that aliases make too large.
    """

    yaml_implicit_resolvers: ClassVar[dict] = {}  # type: ignore[misc]  # the stubs take it for one of an instance
    yaml_constructors: ClassVar[dict] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        if self._depth >= _MOST_DEPTH:
            raise ConstructorError(None, None, f"nested deeper than {_MOST_DEPTH} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        if not isinstance(node, yaml.MappingNode):
            raise ConstructorError(None, None, "must hold keys and values", node.start_mark)
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a name", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConstructorError(None, None, f"key {quoted(key)} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Return a text that can be written to a file again, and be the name of one."""
        text = self.construct_scalar(node)
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConstructorError(None, None, f"{quoted(text)} holds a NUL byte or half of a character", node.start_mark)
        return text

    def construct_unknown(self, node: yaml.Node) -> NoReturn:
        raise ConstructorError(None, None, f"tag {quoted(node.tag)} is not allowed; write the value without it", node.start_mark)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Read `010` as ten; PyYAML's own constructor reads octal."""
        return int(self.construct_scalar(node))


class Yaml12Dumper(yaml.SafeDumper):
    """Quotes texts such as `08` and `1e5`, which are numbers in YAML 1.2 alone."""

    yaml_implicit_resolvers: ClassVar[dict] = {  # type: ignore[misc]  # the stubs take it for one of an instance
        first: list(found) for first, found in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    for _class in (_Yaml12Loader, Yaml12Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
for _tag, _construct in {
    "bool": yaml.SafeLoader.construct_yaml_bool,
    "null": yaml.SafeLoader.construct_yaml_null,
    "int": _Yaml12Loader.construct_decimal,
    "float": yaml.SafeLoader.construct_yaml_float,
    "str": _Yaml12Loader.construct_text,
    "seq": yaml.SafeLoader.construct_yaml_seq,
    "map": yaml.SafeLoader.construct_yaml_map,
}.items():
    _Yaml12Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)
_Yaml12Loader.add_constructor(None, _Yaml12Loader.construct_unknown)


def _check_size(root: yaml.Node) -> None:
    """Count what the document holds, an alias as what it stands for. Raises ConstructorError for too much."""
    sizes: dict[int, int | None] = {}  # by node; None while its children are counted

    def count(node: yaml.Node) -> int:
        if id(node) in sizes:
            counted = sizes[id(node)]
            if counted is None:
                raise ConstructorError(None, None, "a value contains itself", node.start_mark)
            return counted
        sizes[id(node)] = None
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        total = 1 + sum(map(count, children))
        if total > _MOST_VALUES:
            raise ConstructorError(None, None, f"holds more than {_MOST_VALUES:,} values", node.start_mark)
        sizes[id(node)] = total
        return total

    count(root)


@lru_cache(maxsize=64)  # a report reads the settings of a run several times, at 10 ms
def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Yaml12Loader)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2. Raises UserError naming `where` and the line of what is wrong or too large."""
    if len(text) > MOST_BYTES:
        raise UserError(f"{where}: must be a configuration of at most {MOST_BYTES:,} bytes, but is larger")
    try:
        return copy.deepcopy(_load(text))
    # ValueError, LookupError: a tag on a text that is no value of it, an integer of thousands of digits
    except (yaml.YAMLError, ValueError, LookupError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise UserError(f"{where}{line}: not valid YAML: {problem}") from None


def find_comment(text: str) -> str:
    """Return the comment behind the last value of a YAML text; empty if there is none, or if the text is not valid."""
    if "#" not in text:
        return ""
    try:
        ends = [token.end_mark.index for token in yaml.scan(text) if isinstance(token, _WRITTEN)]
    except (yaml.YAMLError, ValueError):
        return ""  # `read_yaml` says why
    rest = text[max(ends, default=0) :].strip()
    return rest if rest.startswith("#") else ""
