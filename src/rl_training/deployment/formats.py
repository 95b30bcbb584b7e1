"""The formats of an exported policy: writing one as bytes, and running these bytes.

Both begin with `torch.export`, which traces the policy's module with a batch size that can change.
Traces contain the paths of source files, which are removed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.errors import UserError, brief
from rl_training.execution.policy_module import LeafInputs

Format = Literal["onnx", "torch"]
FORMATS: tuple[str, ...] = get_args(Format)
ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}

OPSET = 18
"""Version of the ONNX operators: the one that PyTorch translates to without a conversion"""
MAX_ONNX_BYTES = 2 * 10**9
"""An ONNX file is a protocol buffer, which has less than 2 GiB"""
METADATA = "metadata.json"
"""Extra file of a `.pt2` archive that contains the metadata"""

Arrays = Mapping[str, np.ndarray]
Runner = Callable[[Arrays], list[np.ndarray]]
"""Runs an exported policy: inputs by name give the outputs in order"""


def check_packages(format_name: str) -> None:
    """Raise `UserError` if a package that the format needs is missing."""
    for package in ("onnx", "onnxscript", "onnxruntime") if format_name == "onnx" else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(
                f"the format onnx needs the package {package}; install it with "
                "`pip install 'rl-training[export]'`"
            ) from error


def write(
    format_name: str,
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the bytes of the exported module; `inputs` are examples, each with two rows."""
    with _quiet():
        program = _traced(module, inputs)
        if format_name == "torch":
            return _torch_bytes(program, metadata)
        return _onnx_bytes(program, inputs, outputs, metadata)


def runner(format_name: str, data: bytes) -> Runner:
    """Load an exported policy from its bytes, as its users will."""
    return _torch_runner(data) if format_name == "torch" else _onnx_runner(data)


def _traced(module: nn.Module, inputs: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes: Any = [{0: batch} for _ in inputs]
    if isinstance(module, LeafInputs):  # its `forward` takes any number of inputs
        shapes = [tuple(shapes)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # PyTorch prints what it cannot trace
            program = torch.export.export(
                module, tuple(inputs.values()), dynamic_shapes=tuple(shapes)
            )
    except RuntimeError as error:  # PyTorch's own errors of tracing are such errors too
        raise UserError(
            "the policy cannot be exported, because PyTorch cannot trace its networks: "
            f"{brief(error)}; networks must not branch on the values of tensors (use torch.where)"
        ) from error
    for node in list(program.graph.nodes):
        node.meta.pop("stack_trace", None)
        _simplify(node)
    program.graph_module.recompile()
    return program


def _simplify(node: torch.fx.Node) -> None:
    """Replace `x - (-y)`, which suits PyTorch's compiler only, by `x + y`, which has equal bits."""
    operations = torch.ops.aten
    negated = node.args[1] if node.target == operations.sub.Tensor else None
    if isinstance(negated, torch.fx.Node) and negated.target == operations.neg.default:
        node.target = operations.add.Tensor
        node.args = (node.args[0], negated.args[0])
        if not negated.users:
            node.graph.erase_node(negated)


def _torch_bytes(program: torch.export.ExportedProgram, metadata: Mapping[str, str]) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA: json.dumps(dict(metadata), indent=1)})
    return file.getvalue()


def _torch_runner(data: bytes) -> Runner:
    with _quiet():
        module: Any = torch.export.load(io.BytesIO(data)).module()

    def run(inputs: Arrays) -> list[np.ndarray]:
        with torch.inference_mode():
            found = module(*(torch.from_numpy(array) for array in inputs.values()))
        tensors = found if isinstance(found, tuple | list) else (found,)
        return [tensor.numpy(force=True) for tensor in tensors]

    return run


def _onnx_bytes(
    program: torch.export.ExportedProgram,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> bytes:
    import onnx

    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    if size > MAX_ONNX_BYTES:
        raise UserError(
            f"the policy has {size:,} bytes; a file in the format onnx has at most "
            f"{MAX_ONNX_BYTES:,}; use the format torch"
        )
    translated = torch.onnx.export(
        program,
        tuple(inputs.values()),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(inputs),
        output_names=list(outputs),
        verbose=False,
    )
    assert translated is not None, "only the previous exporter returns nothing"
    model = translated.model_proto
    _remove_traces(model)
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def _remove_traces(model: Any) -> None:
    """Remove the records of the translation, and name the batch dimension."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for value in (*graph.input, *graph.output):
        first = value.type.tensor_type.shape.dim[0]
        first.dim_param = "batch"


def _onnx_runner(data: bytes) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(inputs: Arrays) -> list[np.ndarray]:
        found: list[np.ndarray] = session.run(None, dict(inputs))
        return found

    return run


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide messages of PyTorch's exporters about themselves, such as missing other packages."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
