"""What can be called how: Python's signatures, pydantic's fields, and the documentation of compiled bindings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from llmserve.engine.tensorrt_llm.signatures import call_problems


class Nanobind:
    """As nanobind documents its classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """__init__(self, policy: m.Policy = <Policy.FIRST: 1>, windows: collections.abc.Sequence[tuple[int, int]] | None = None, *, on_log: collections.abc.Callable[[int, str], None] | None = None) -> None"""  # noqa: E501

    def save(self, *args: Any, **kwargs: Any) -> None:
        """save(self, arg: str, /) -> None"""

    def silent(self, *args: Any, **kwargs: Any) -> None:
        pass


class Pybind:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """__init__(*args, **kwargs)
        Overloaded function.

        1. __init__(self: m.Executor, model_path: os.PathLike, model_type: m.ModelType) -> None

        2. __init__(self: m.Executor, engine_buffer: buffer, json_config_str: str, model_type: m.ModelType) -> None
        """


class Pydantic:
    model_fields = {  # noqa: RUF012
        "model": SimpleNamespace(is_required=lambda: True),
        "dtype": SimpleNamespace(is_required=lambda: False),
    }

    def __init__(self, **data: Any) -> None:
        pass


def test_nanobinds_documentation_is_read() -> None:
    assert call_problems(Nanobind, 0, ("policy", "windows", "on_log")) == []
    assert call_problems(Nanobind, 2, ("on_log",)) == []
    assert call_problems(Nanobind, 3, ("tuple",)) == [
        "takes 2 positional arguments, but we pass 3",
        "takes no parameter tuple",
    ]
    assert call_problems(Nanobind, 1, ("policy",)) == ["takes no parameter policy"]  # it would be given twice
    assert call_problems(Nanobind.save, 2, ()) == []
    assert call_problems(Nanobind.save, 1, ("arg",)) == ["takes no parameter arg"]


def test_one_of_pybinds_overloads_must_fit() -> None:
    assert call_problems(Pybind, 0, ("model_path", "model_type")) == []
    assert call_problems(Pybind, 0, ("model_path", "json_config_str")) == [
        "takes no parameter json_config_str",
        "requires a parameter model_type, which we do not pass",
    ]


def test_a_models_fields_are_its_parameters() -> None:
    assert call_problems(Pydantic, 0, ("model", "dtype")) == []
    assert call_problems(Pydantic, 0, ("type",)) == [
        "takes no parameter type",
        "requires a parameter model, which we do not pass",
    ]


def test_what_says_nothing_is_not_judged() -> None:
    assert call_problems(Nanobind.silent, 1, ("anything",)) is None
