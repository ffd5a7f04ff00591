"""Parsing of YAML texts into plain data, with errors that name the place."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_bapo.errors import UserError


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, changed to refuse duplicate keys, of which it keeps the last, and values that contain
    themselves."""

    def construct_document(self, node: yaml.Node) -> Any:
        return self.construct_object(node, deep=True)  # deep refuses an alias of a value that contains it

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # construct_mapping would be too late: it sees the keys that `<<` has merged in, which may be overridden.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {name!r} is here for the second time; keep one of them", problem_mark=key.start_mark
                )
            seen.add(name)
        return node


def parse_yaml(text: str, where: str, loader: type[yaml.SafeLoader] = UniqueKeyLoader) -> Any:
    """Return the value of a YAML text, which can only be plain data; `where` names the text in messages."""
    try:
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context or ""
        if problem.startswith("but "):  # about a second document: the sentence begins in the context
            problem = f"{error.context}, {problem}"
        raise UserError(f"{where}{line}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{where} nests values too deeply to be read; remove brackets or indentation") from None


def text_after(text: str) -> str:
    """Return what follows the value in a valid YAML text: a comment, or nothing."""
    node = yaml.compose(text, Loader=UniqueKeyLoader)
    return "" if node is None else text[node.end_mark.index :].strip()
