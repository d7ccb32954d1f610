"""Triton's interpreter without what it makes anew for each operation: types and shapes of tensors, which never change.

It makes a type of a block, and a tuple of constants of its shape, for every sum of two numbers. That takes more time
than the sums. What is remembered here is what the interpreter made the first time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MAKE_BLOCK_TYPE = core.block_type.__init__
BROADCAST = TritonSemantic.broadcast_impl_value
CAST = TritonSemantic.cast
COMPUTATION_TYPE = TritonSemantic.computation_type_impl
NUMPY_TYPE = interpreter._get_np_dtype

BLOCK_TYPES: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}  # by the element's identity: it lives in the value
SHAPES: dict[tuple[int, ...], Any] = {}  # Triton's tuple of numbers: one for all blocks of that shape
SHAPES_OF_TENSORS: dict[int, tuple[Any, Any]] = {}  # by the identity of a shape: as constants, and their product
COMPUTATION_TYPES: dict[tuple[str, bool, str, bool, bool], Any] = {}
NUMPY_TYPES: dict[str, Any] = {}


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    numbers = tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape])
    known = BLOCK_TYPES.get((id(element_ty), numbers))
    if known is None:
        MAKE_BLOCK_TYPE(self, element_ty, shape)
        self.shape = SHAPES.setdefault(numbers, self.shape)
        known = BLOCK_TYPES[id(element_ty), numbers] = dict(vars(self))
    self.__dict__.update(known)


@cache
def no_shape() -> tuple[Any, Any]:
    return core.tuple([]), core.constexpr(1)


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if not type.is_block():
        self.shape, self.numel = no_shape()
        return
    known = SHAPES_OF_TENSORS.get(id(type.shape))
    if known is None:
        constants = core.tuple([core.constexpr(size) for size in type.shape]), core.constexpr(type.numel)
        known = SHAPES_OF_TENSORS[id(type.shape)] = constants
    self.shape, self.numel = known


def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = lhs.type, rhs.type
    if left.is_block() and right.is_block() and left.shape is right.shape:
        return lhs, rhs
    return BROADCAST(self, lhs, rhs)


def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
    return input if input.dtype is dst_ty.scalar else CAST(self, input, dst_ty, fp_downcast_rounding)


def computation_type(self: Any, left: Any, is_scalar: bool, right: Any, right_is_scalar: bool, divides: bool) -> Any:
    key = left.name, is_scalar, right.name, right_is_scalar, divides
    found = COMPUTATION_TYPES.get(key)
    if found is None:
        found = COMPUTATION_TYPE(self, left, is_scalar, right, right_is_scalar, divides)
        COMPUTATION_TYPES[key] = found
    return found


def change_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """The same as the interpreter's, which copies the arguments of each call."""
    semantic = interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


def numpy_type(dtype: Any) -> Any:
    scalar = dtype.element_ty if type(dtype) is core.block_type else dtype
    found = NUMPY_TYPES.get(scalar.name)
    if found is None:
        found = NUMPY_TYPES[scalar.name] = NUMPY_TYPE(scalar)
    return found


def remember_types() -> None:
    """From now on, in this process. What compiles does so in others."""
    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast
    TritonSemantic.cast = cast
    TritonSemantic.computation_type_impl = computation_type
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_attr = change_attribute
