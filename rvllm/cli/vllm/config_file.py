"""Files of options, in YAML's safe part. Knows no option."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import yaml


def read(text: str) -> dict[str, Any]:
    """The mapping in `text`: YAML 1.1 as vLLM reads it, but dates stay text. Raises ValueError with the line.

    A name that stands twice is refused: a YAML library takes the last.
    """
    import yaml

    try:
        found = yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        raise ValueError(f"line {mark.line + 1 if mark else 1}: {cause.problem or cause.context}") from None
    except yaml.YAMLError as cause:
        raise ValueError(str(cause).partition("\n")[0]) from None
    if not isinstance(found, dict | None):
        raise ValueError("line 1: options are written as `name: value`")
    return found or {}


@cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Names are text, and each stands once."""

        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
            names = set()
            for key, _ in node.value:
                name = self.construct_object(key)
                if not isinstance(name, str):
                    raise yaml.constructor.ConstructorError(problem=f"{name!r} is no name", problem_mark=key.start_mark)
                if name in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{name!r} is there twice", problem_mark=key.start_mark
                    )
                names.add(name)
            return super().construct_mapping(node, deep)

    return Loader
