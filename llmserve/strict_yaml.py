"""YAML for files that people edit: rejects duplicate keys, and reports every problem as a `ValueError`."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compares keys by text: `a` and `"a"` are the same key, as for the constructor."""
        node, seen = super().compose_mapping_node(anchor), set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def read_yaml(content: str | bytes) -> Any:
    try:
        return _Loader(content).get_single_data()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error
