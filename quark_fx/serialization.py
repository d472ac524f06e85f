"""Store a quantized model as `model.safetensors` and `graph.json`, and read it back. Nothing is pickled.

The graph is a list of calls of operators by qualified name; reading it can call nothing but `aten`,
`quark_fx` and the named operator libraries already loaded, and a handful of functions of Python's
`operator` and `math`.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from quark_fx.checkpoint_files import GRAPH_FILE
from quark_fx.config import QuantConfig
from quark_fx.errors import QuarkError
from quark_fx.graph import restore_values, set_parameter, static_size, stored_tensors
from quark_fx.isolation import isolated, quiet
from quark_fx.model import QuantizedModel
from quark_fx.pass_manager import PassRecord
from quark_fx.report import Row
from quark_fx.signature import Signature

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
TENSOR_FILE = "model.safetensors"
_PYTHON = {
    **{name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "pow")},
    **{f"sym_{name}": getattr(torch, f"sym_{name}") for name in ("max", "min", "float", "int", "ite", "not", "sqrt")},
    **{f"math_{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
}
_FORBIDDEN = ("aten.from_file.", "aten.save.", "debugprims.")
"""Operators that touch files."""
_MODULE = re.compile(r'(?:fqn|default_factory_module)\\*"\s*:\s*\\*"([\w.]+)')
"""Modules that torch would import to rebuild a structure (an enum, a `defaultdict`)."""
_OUTPUTS = re.compile(r'"type"\s*:\s*"(transformers(?:\.\w+)+)\.\w+"')
"""Modules that may be imported for what a model returns; any other could be anyone's."""
_NAMESPACES = frozenset({"aten", "prims", "quark_fx", "transformers", "torchvision"})
"""Operator libraries a stored graph may call."""
_PYTHON_NAMES = {function: name for name, function in _PYTHON.items()}


def save_model(qmodel: QuantizedModel, directory: Path) -> None:
    """Write `qmodel` to `directory`, creating it.

    Raises:
        QuarkError: if the directory cannot be written or holds a checkpoint, or the graph holds a call without a name.
    """
    gm = qmodel.graph_module
    if (directory / "config.json").exists() and not (directory / GRAPH_FILE).exists():
        raise QuarkError(f"{directory} holds a checkpoint, whose tensors would be overwritten; choose another one")
    try:
        signature = _signature_to_dict(qmodel.signature)
    except (NotImplementedError, TypeError) as error:
        raise QuarkError(
            f"the structure of the model's inputs or outputs cannot be stored: {error}; let the model return tuples, "
            "lists or dicts, or register the type with a serialized_type_name (torch.export.register_dataclass)"
        ) from error
    document = {
        "version": FORMAT_VERSION,
        "signature": signature,
        "config": qmodel.config.to_dict(),
        "rows": qmodel.report().to_rows(),
        "passes": [asdict(record) for record in qmodel.report().passes],
        "inputs": [_value_to_dict(node) for node in gm.graph.nodes if node.op == "placeholder"],
        "nodes": [_node_to_dict(node) for node in gm.graph.nodes],
    }
    partial = [directory / f"{name}.partial" for name in (TENSOR_FILE, GRAPH_FILE)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(_apart(stored_tensors(gm)), partial[0])
        partial[1].write_text(json.dumps(document, indent=1))
        # The graph makes the directory a model: an interruption leaves the old one, the new one or none.
        (directory / GRAPH_FILE).unlink(missing_ok=True)
        partial[0].replace(directory / TENSOR_FILE)
        partial[1].replace(directory / GRAPH_FILE)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            for file in partial:
                file.unlink(missing_ok=True)
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        remedy = "a file is in the way" if in_the_way else "make room"
        raise QuarkError(f"{directory} cannot be written: {error}; {remedy}, or choose another directory") from error


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors none of which shares memory with another, as the file format asks for."""
    found, seen = {}, set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        memory = own.untyped_storage().data_ptr()
        found[name] = own.clone() if memory in seen or own.untyped_storage().nbytes() != own.nbytes else own
        seen.add(memory)
    return found


@isolated
def load(
    directory: str | Path, *, device: str | torch.device = "cpu", namespaces: Collection[str] = ()
) -> QuantizedModel:
    """Read what `QuantizedModel.save` wrote; the result computes the same, bit for bit.

    Args:
        directory: the directory given to `save`.
        device: where its tensors go.
        namespaces: operator libraries of yours that the graph may call, beside those of torch and transformers.

    Raises:
        QuarkError: if files are missing, damaged, of a newer version, or call something unknown.
    """
    directory = Path(directory)
    try:
        document = json.loads((directory / GRAPH_FILE).read_text())
        with safe_open(directory / TENSOR_FILE, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError) as error:
        hint = "; transformers' from_pretrained reads checkpoints" * (directory / "config.json").exists()
        raise QuarkError(f"{directory} holds no readable quantized model: {error}{hint}") from error
    if not isinstance(document, dict) or "version" not in document:
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: it holds no graph")
    if document["version"] != FORMAT_VERSION:
        raise QuarkError(
            f"{directory} has format version {document['version']}, this quark_fx reads {FORMAT_VERSION}; "
            "update quark_fx or save the model again"
        )
    try:
        gm = _graph_from_dict(document, tensors, torch.device(device), _NAMESPACES | set(namespaces))
        return QuantizedModel(
            gm,
            _signature_from_dict(document["signature"]),
            QuantConfig.from_dict(document["config"]),
            [Row(**row) for row in document["rows"]],
            [PassRecord.from_dict(record) for record in document["passes"]],
        )
    except QuarkError:
        raise
    except Exception as error:  # what a damaged graph breaks is anyone's guess
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: {type(error).__name__}: {error}") from error


def _node_to_dict(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target_name(node)}
    if node.args:
        data["args"] = [_encode(a) for a in node.args]
    if node.kwargs:
        data["kwargs"] = {k: _encode(v) for k, v in node.kwargs.items()}
    if stack := node.meta.get("nn_module_stack"):
        data["module"] = next((path for path, _ in reversed(list(stack.values())) if path), "")
    if name := node.meta.get("made_by"):
        data["made_by"] = name
    return data


def _target_name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    if node.target in _PYTHON_NAMES:
        return f"python.{_PYTHON_NAMES[node.target]}"
    raise QuarkError(f"the call of {node.target} at %{node.name} cannot be stored: it is not a registered operator")


def _resolve(name: str, allowed: frozenset[str]) -> Callable[..., Any]:
    namespace, _, rest = name.partition(".")
    if namespace == "python":
        if rest not in _PYTHON:
            raise QuarkError(f"the stored graph calls {name}, which is not allowed")
        return _PYTHON[rest]  # type: ignore[no-any-return]
    if namespace not in allowed or name.startswith(_FORBIDDEN):
        raise QuarkError(
            f"the stored graph calls {name}, which is not allowed; if you trust where it comes from and know the "
            f"operator, pass load(..., namespaces=({namespace!r},))"
        )
    packet, _, overload = rest.rpartition(".")
    operator_packet = getattr(getattr(torch.ops, namespace), packet, None)
    found = getattr(operator_packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise QuarkError(f"the stored graph calls {name}, which is not registered; import the library that defines it")
    return found


def _encode(value: Any) -> Any:
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, slice):
        return {"slice": [_encode(part) for part in (value.start, value.stop, value.step)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise QuarkError(f"a graph argument of type {type(value).__name__} cannot be stored")


def _decode(value: Any, nodes: dict[str, Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "torch":
        found = getattr(torch, content)
        assert isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        return found
    if kind == "slice":
        return slice(*(_decode(part, nodes, device) for part in content))
    return device if kind == "device" else float(content)


def _value_to_dict(node: Node) -> dict[str, Any] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    sizes: list[Any] = list(value.shape)  # of a dimension that varies, a size that was seen
    shape = [int(d) if static_size(d) is not None else {"hint": int(d.node.hint)} for d in sizes]
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def _graph_from_dict(
    document: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, allowed: frozenset[str]
) -> GraphModule:
    root = torch.nn.Module()
    holder = GraphModule(root, Graph())
    for name, tensor in tensors.items():
        set_parameter(holder, name, tensor)
    graph, nodes = Graph(), dict[str, Node]()
    for data in document["nodes"]:
        args = tuple(_decode(data.get("args", []), nodes, device))
        kwargs = {k: _decode(v, nodes, device) for k, v in data.get("kwargs", {}).items()}
        target = _resolve(data["target"], allowed) if data["op"] == "call_function" else data["target"]
        if data["op"] == "output":
            args = (tuple(args[0]),)
        _require_harmless(data["op"], target, kwargs, tensors)
        node = graph.create_node(data["op"], target, args, kwargs, name=data["name"])
        node.meta["stack_trace"] = ""  # the user's paths are not stored
        node.meta["nn_module_stack"] = {"": (data.get("module", ""), "")}
        if "made_by" in data:
            node.meta["made_by"] = data["made_by"]
        nodes[data["name"]] = node
    gm = GraphModule(holder, graph, class_name="CapturedGraph")
    _restore(gm, document["inputs"], device)
    return gm


def _require_harmless(op: str, target: Any, kwargs: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse what torch.fx would paste into the source of `forward` as it stands."""
    known = {
        "placeholder": isinstance(target, str) and target.isidentifier(),
        "get_attr": target in tensors,
        "call_function": True,
        "output": target == "output",
    }
    if not known.get(op, False) or not all(key.isidentifier() for key in kwargs):
        raise QuarkError(f"the stored graph holds a {op!r} of {target!r}, which is not allowed")


def _restore(gm: GraphModule, inputs: list[dict[str, Any] | None], device: torch.device) -> None:
    examples: list[Tensor | None] = []
    dynamic: list[list[int]] = []
    for data in inputs:
        shape = data["shape"] if data is not None else []
        sizes = [d if isinstance(d, int) else d["hint"] for d in shape]
        examples.append(
            None if data is None else torch.empty(sizes, dtype=getattr(torch, data["dtype"]), device=device)
        )
        dynamic.append([i for i, d in enumerate(shape) if not isinstance(d, int)])
    try:
        with quiet():  # torch prints what is told here
            restore_values(gm, examples, dynamic)
    except Exception as error:  # whatever an operator without symbolic shapes (a recurrent one) raises
        logger.debug("shapes could not be restored, so the model runs but cannot be exported: %s", error)
        restore_values(gm, examples, [()] * len(dynamic))  # raises if the graph itself is at fault
        for node in gm.graph.nodes:
            node.meta.pop("val", None)


def _signature_to_dict(signature: Signature) -> dict[str, Any]:
    return {
        "in_spec": pytree.treespec_dumps(signature.in_spec),
        "out_spec": pytree.treespec_dumps(signature.out_spec),
        "parameters": signature.parameters,
        "input_names": signature.input_names,
        "output_names": signature.output_names,
        "input_shapes": signature.input_shapes,
        "input_dtypes": [None if d is None else str(d).removeprefix("torch.") for d in signature.input_dtypes],
        "input_constants": dict(signature.input_constants),
        "input_limits": signature.input_limits,
        "fixed_arguments": dict(signature.fixed_arguments),
    }


def _signature_from_dict(data: dict[str, Any]) -> Signature:
    return Signature(
        in_spec=_structure(data["in_spec"]),
        out_spec=_structure(data["out_spec"]),
        parameters=tuple(data["parameters"]),
        input_names=tuple(data["input_names"]),
        output_names=tuple(data["output_names"]),
        input_shapes=tuple(None if s is None else tuple(s) for s in data["input_shapes"]),
        input_dtypes=tuple(None if d is None else getattr(torch, d) for d in data["input_dtypes"]),
        input_constants=data["input_constants"],
        input_limits=tuple((name, dim, low, high) for name, dim, low, high in data["input_limits"]),
        fixed_arguments=data["fixed_arguments"],
    )


def _structure(text: str) -> pytree.TreeSpec:
    for module in _MODULE.findall(text):
        if module not in sys.modules:
            raise QuarkError(f"the stored inputs or outputs are of a type of {module}; import that module first")
    for module in _OUTPUTS.findall(text):  # whose classes register themselves
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise QuarkError(f"the model returns a type of {module}, which is not installed here: {error}") from error
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise QuarkError(
            f"the stored inputs or outputs are of a type that nothing has registered: {str(error).split(';')[0]}; "
            "import the module that does, then load again"
        ) from error
