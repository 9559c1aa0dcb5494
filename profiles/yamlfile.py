"""YAML read as untrusted input: plain data only, no anchors, no duplicate keys, at most 1 MiB; and written with comments."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from seqmoe.profiles.errors import ProfileError

MAX_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Safe loader that also refuses aliases (their expansion can exhaust memory) and keys given twice or not as text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.constructor.ConstructorError(None, None, "anchors and aliases are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key is not text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# A date stays text, and only true/false are booleans: `on`, `no` and 12:30 mean what they look like.
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")
        and not (tag == "tag:yaml.org,2002:bool" and first not in "tTfF")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in the file. Raises ProfileError with one line for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ProfileError(f"{path} is larger than 1 MiB, so it is no profile; a profile has a few KiB")
    return parse_yaml(data, str(path))


def parse_yaml(data: bytes, where: str) -> dict[str, Any]:
    """The mapping in `data`; `where` names the source in errors."""
    try:
        content = yaml.load(data.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError:
        raise ProfileError(f"{where} is not text in UTF-8, so it is no profile") from None
    except RecursionError:
        raise ProfileError(f"{where} is nested too deeply to be a profile") from None
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "not valid"
        at = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ProfileError(f"{where}{at}: not a valid profile: {one_line(problem)}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number or date that Python cannot hold
        raise ProfileError(f"{where} is not valid YAML: {one_line(str(error))}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ProfileError(f"{where} holds {found}, not a profile (a mapping that begins with apiVersion)")
    return content


def dump_commented(model: BaseModel, header: str) -> str:
    """The model as YAML, each field that has a description preceded by it as a comment."""
    lines = [f"# {line}" for line in header.splitlines()]
    _emit(model, 0, lines)
    return "\n".join(lines) + "\n"


def _emit(model: BaseModel, indent: int, lines: list[str]) -> None:
    pad = " " * indent
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if not indent and name not in ("apiVersion", "kind"):
            lines.append("")
        if field.description:
            lines.append(f"{pad}# {field.description}")
        if isinstance(value, BaseModel):
            lines.append(f"{pad}{name}:")
            _emit(value, indent + 2, lines)
            continue
        plain = model.model_dump(mode="json", include={name})
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)
        lines += [pad + line for line in text.rstrip("\n").split("\n")]


def one_line(text: str) -> str:
    """The text without line breaks, at most 300 characters."""
    return " ".join(text.split())[:300]
