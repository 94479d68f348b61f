"""Lists what a traced TensorFlow function computes: its operations, with dtypes and work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from precision_bert.audit.record import MULTIPLIES, Kind
from precision_bert.policies import HALF

_MULTIPLIES: dict[str, Kind] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), "matmul"),
    **dict.fromkeys(("SparseMatMul", "SparseTensorDenseMatMul"), "matmul"),
    **dict.fromkeys(("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), "convolution"),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv2DBackpropInputV2"), "convolution"),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv2DBackpropFilterV2"), "convolution"),
    **dict.fromkeys(("Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"), "convolution"),
    "DepthwiseConv2dNativeBackpropInput": "convolution",
    "DepthwiseConv2dNativeBackpropFilter": "convolution",
    **dict.fromkeys(("Einsum", "XlaEinsum"), "einsum"),
    **dict.fromkeys(("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"), "recurrent"),
    **dict.fromkeys(("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"), "recurrent"),
}

# What computes nothing: every number that comes out is one that went in, in its place or another
# and perhaps in another dtype, or is written in the graph. Whatever is not named here computes.
_MOVES = """
Placeholder PlaceholderWithDefault Const Identity IdentityN StopGradient PreventGradient
EnsureShape Cast Bitcast Snapshot NoOp Print PrintV2 Assert VarHandleOp ReadVariableOp
AssignVariableOp ResourceGather ResourceGatherNd Reshape ExpandDims Squeeze Shape ShapeN Size Rank
VariableShape BroadcastTo Tile Fill ZerosLike OnesLike Empty Transpose ConjugateTranspose Reverse
ReverseV2 ReverseSequence Roll Pack Unpack Concat ConcatV2 Split SplitV Slice StridedSlice
StridedSliceGrad Gather GatherV2 GatherNd Pad PadV2 MirrorPad Select SelectV2 DynamicStitch
DynamicPartition ParallelDynamicStitch BatchToSpaceND SpaceToBatchND DepthToSpace SpaceToDepth
ExtractImagePatches MatrixBandPart MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart
MatrixDiagPartV2 MatrixDiagPartV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
TensorScatterUpdate IteratorGetNext OptionalFromValue OptionalGetValue StackPushV2 StackPopV2
TensorArrayV3 TensorArrayReadV3 TensorArrayWriteV3 TensorArrayGatherV3 TensorArrayScatterV3
TensorListElementShape TensorListFromTensor TensorListGather TensorListGetItem TensorListPopBack
TensorListPushBack TensorListReserve TensorListScatter TensorListSetItem TensorListStack
TensorListConcatV2 EmptyTensorList
"""

# Operations whose work is in their function bodies. Names within the bodies of loops and branches
# begin at the top again; within those of calls they begin at the call.
_CONTROL_FLOW = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "RemoteCall", "XlaLaunch"}
_WITHOUT_WORK = {*_MOVES.split(), *_CONTROL_FLOW, *_CALLS}


@dataclass(frozen=True)
class TracedOperation:
    """One operation of a traced function.

    Attributes:
        names: Its name, behind the names of the function calls that it lies in, outermost first.
        type: TensorFlow's type of it, such as `"MatMul"`.
        kind: What it counts as; `None` if it computes nothing in a float dtype. A `"cast"` rounds
            numbers to half precision and computes nothing else.
        dtype: What it computes in; `None` where kind is.
        multiply_adds: For a multiply, how many pairs of numbers are multiplied and added, or `None`
            where the traced shapes do not tell. A loop's body counts once.
    """

    names: tuple[str, ...]
    type: str
    kind: Kind | None
    dtype: str | None
    multiply_adds: int | None


def traced_operations(graph: Any, calls: tuple[str, ...] = ()) -> Iterator[TracedOperation]:
    """Yields every operation of a graph and of the functions that it calls, each time it does.

    An operation computes if it has a float tensor among its inputs and outputs and does more than
    to move, repeat, store or convert numbers. It computes in the dtype that TensorFlow calls its
    `T`, or, without one, in the narrowest float dtype that it takes or gives.

    Args:
        graph: A `FuncGraph`, as `get_concrete_function(...).graph` has it.
        calls: Names of the calls that led here.
    """
    for operation in graph.get_operations():
        kind, dtype = _kind_and_dtype(operation)
        yield TracedOperation(
            (*calls, operation.name),
            operation.type,
            kind,
            dtype,
            _multiply_adds(operation) if kind in MULTIPLIES else None,
        )
        inner = calls if operation.type in _CONTROL_FLOW else (*calls, operation.name)
        for name in _functions(operation):
            # Private, but the only way to a body with shapes: a GraphDef's library has none.
            yield from traced_operations(graph._get_function(name).graph, inner)


def _functions(operation: Any) -> Iterator[str]:
    for attribute in operation.op_def.attr:
        if attribute.type == "func":
            names = [operation.get_attr(attribute.name).name]
        elif attribute.type == "list(func)":
            names = [function.name for function in operation.get_attr(attribute.name)]
        else:
            continue
        yield from filter(None, names)


def _kind_and_dtype(operation: Any) -> tuple[Kind | None, str | None]:
    inputs, outputs = _float_dtypes(operation.inputs), _float_dtypes(operation.outputs)
    dtypes = inputs | outputs
    if operation.type == "Cast" and outputs <= set(HALF) and outputs - inputs:
        return "cast", outputs.pop()
    if not dtypes or operation.type in _WITHOUT_WORK:
        return None, None
    dtype = min(dtypes, key=lambda name: tf.dtypes.as_dtype(name).size)
    if len(dtypes) > 1:
        # FusedBatchNorm and the like take some inputs in another dtype than they work on: T.
        with contextlib.suppress(ValueError):
            own = operation.get_attr("T")
            if isinstance(own, tf.DType) and own.is_floating:
                dtype = own.name
    return _MULTIPLIES.get(operation.type, "other"), dtype


def _float_dtypes(tensors: Any) -> set[str]:
    dtypes = [tensor.dtype.base_dtype for tensor in tensors]
    return {dtype.name for dtype in dtypes if dtype.is_floating}


def _multiply_adds(operation: Any) -> int | None:
    inputs = [tensor.shape for tensor in operation.inputs]
    output = operation.outputs[0].shape
    try:
        if operation.type == "MatMul":
            depth = inputs[0][0 if operation.get_attr("transpose_a") else 1]
            return _product(output) * _product([depth])
        if operation.type.startswith("BatchMatMul"):
            depth = inputs[0][-2 if operation.get_attr("adj_x") else -1]
            return _product(output) * _product([depth])
        if operation.type == "Einsum":
            return _product(_einsum_sizes(operation.get_attr("equation").decode(), inputs).values())
        if _MULTIPLIES[operation.type] == "convolution":
            # Whatever the direction: each number of the forward output meets each of a filter's.
            is_filter_gradient = "BackpropFilter" in operation.type
            forward = inputs[2] if "Backprop" in operation.type else output
            kernel = output if is_filter_gradient else inputs[1]
            # Filters are (…space, channels in, channels out), for either data format. A depthwise
            # one meets one channel only.
            window = kernel[:-2] if operation.type.startswith("Depthwise") else kernel[:-1]
            return _product(forward) * _product(window)
    except ValueError:
        pass
    return None


def _einsum_sizes(equation: str, shapes: list[tf.TensorShape]) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for labels, shape in zip(equation.split("->")[0].split(","), shapes, strict=True):
        dimensions = shape.as_list()
        if "..." in labels:
            # Dimensions of an ellipsis are matched from the right, so they are numbered from there.
            before, _, after = labels.partition("...")
            free = len(dimensions) - len(before) - len(after)
            names = [*before, *(f"...{free - i}" for i in range(free)), *after]
        else:
            names = list(labels)
        for name, dimension in zip(names, dimensions, strict=True):
            if sizes.get(name, 1) in (1, None):  # a 1 broadcasts to what the other operand has
                sizes[name] = dimension
    return sizes


def _product(dimensions: Any) -> int:
    sizes = list(dimensions)  # raises ValueError if even the rank is unknown
    if None in sizes:
        raise ValueError("a dimension is unknown")
    return math.prod(sizes)
