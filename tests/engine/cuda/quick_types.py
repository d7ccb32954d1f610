"""Triton's interpreter without what it makes anew for each operation: types and shapes of tensors, which never change.

It makes a type of a block, and a tuple of constants of its shape, for every sum of two numbers. That takes more time
than the sums. What is remembered here is what the interpreter made the first time. Two operands of different shapes are
not copied to one shape either: numpy does without.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MAKE_BLOCK_TYPE = core.block_type.__init__
BROADCAST = TritonSemantic.broadcast_impl_value
CAST = TritonSemantic.cast
COMPUTATION_TYPE = TritonSemantic.computation_type_impl
NUMPY_TYPE = interpreter._get_np_dtype

UNWRAP = core._unwrap_if_constexpr
PLAIN = frozenset((core.tensor, int, float, bool, str, type(None)))

BLOCK_TYPES: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}  # by the element's identity: it lives in the value
SHAPES: dict[tuple[int, ...], Any] = {}  # Triton's tuple of numbers: one for all blocks of that shape
SHAPES_OF_TENSORS: dict[int, tuple[Any, Any]] = {}  # by the identity of a shape: as constants, and their product
COMPUTATION_TYPES: dict[tuple[str, bool, str, bool, bool], Any] = {}
NUMPY_TYPES: dict[str, Any] = {}
BY_IDENTITY: dict[tuple[int, int], dict[str, Any]] = {}  # as BLOCK_TYPES; the shape is one of SHAPES
COMMON_SHAPES: dict[tuple[int, int], Any] = {}  # of two of SHAPES
BLOCKS: dict[tuple[int, int], Any] = {}  # types by element and shape, both as BY_IDENTITY
CONSTANTS: dict[tuple[type, Any, str], Any] = {}  # numbers as tensors


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    known = BY_IDENTITY.get((id(element_ty), id(shape)))
    if known is not None:
        self.__dict__.update(known)
        return
    numbers = tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape])
    known = BLOCK_TYPES.get((id(element_ty), numbers))
    if known is None:
        MAKE_BLOCK_TYPE(self, element_ty, shape)
        self.shape = SHAPES.setdefault(numbers, self.shape)
        known = BLOCK_TYPES[id(element_ty), numbers] = dict(vars(self))
        BY_IDENTITY[id(element_ty), id(self.shape)] = known
    self.__dict__.update(known)


def init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def unwrap(value: Any) -> Any:
    kind = type(value)
    return value if kind in PLAIN else value.value if kind is core.constexpr else UNWRAP(value)


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


def check_operands(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Both of the same type, in name: a number and a row stay as small as they are."""
    left_is_number, right_is_number = type(lhs) is not core.tensor, type(rhs) is not core.tensor
    left = self.to_tensor_type(lhs) if left_is_number else lhs.dtype
    right = self.to_tensor_type(rhs) if right_is_number else rhs.dtype
    left_points, right_points = type(left) is core.pointer_type, type(right) is core.pointer_type
    if left_points or right_points:
        self.check_ptr_type_impl(left, right, allow_lhs_ptr)
        self.check_ptr_type_impl(right, left, allow_rhs_ptr)
    if left_points or right_points or not arithmetic_check:
        lhs, rhs = self.to_tensor(lhs), self.to_tensor(rhs)
    else:
        dtype = computation_type(self, left, left_is_number, right, right_is_number, div_or_mod)
        lhs = constant(self, lhs, dtype) if left_is_number else cast(self, lhs, dtype)
        rhs = constant(self, rhs, dtype) if right_is_number else cast(self, rhs, dtype)
    shape = common_shape(lhs.type, rhs.type)
    return (lhs, rhs) if shape is None else (of_shape(lhs, shape), of_shape(rhs, shape))


def constant(self: Any, value: Any, dtype: Any) -> Any:
    key = type(value), value, dtype.name
    found = CONSTANTS.get(key)
    if found is None:
        found = self._cast_to_computation_type(value, dtype)
        if value:  # zeros have signs
            CONSTANTS[key] = found
    return found


def common_shape(left: Any, right: Any) -> Any:
    """None where nothing has to change."""
    if not left.is_block():
        return right.shape if right.is_block() else None
    if not right.is_block():
        return left.shape
    if left.shape is right.shape:
        return None
    key = id(left.shape), id(right.shape)
    found = COMMON_SHAPES.get(key)
    if found is None:
        numbers = np.broadcast_shapes(*(tuple(map(unwrap, side.shape)) for side in (left, right)))
        found = COMMON_SHAPES[key] = core.block_type(core.int32, list(numbers)).shape
    return found


def of_shape(value: Any, shape: Any) -> Any:
    """Whose numbers numpy repeats."""
    kind = value.type
    if kind.is_block() and kind.shape is shape:
        return value
    key = id(kind.scalar), id(shape)
    block = BLOCKS.get(key)
    if block is None:
        block = BLOCKS[key] = core.block_type(kind.scalar, shape)
    return core.tensor(value.handle, block)


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
    if getattr(member, core.TRITON_BUILTIN, False):
        member = getattr(member, "__wrapped__", member)  # that it has a semantic is known

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
    TritonSemantic.binary_op_type_checking_impl = check_operands
    interpreter.TensorHandle.__init__ = init_handle
    core._unwrap_if_constexpr = unwrap
