"""Store a quantized model as a graph in JSON and tensors in safetensors, and read it back as untrusted input.

The contents of a file are never unpickled, imported, or compiled. The graph calls operators from a list
(`stored_operators`) with arguments of the types they take; its tensors are `t0`, `t1`, …, and their original names are
stored separately as text. Shapes are not stored but computed: a graph whose operators do not fit together is rejected
before it runs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from keyword import iskeyword
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.resources import Resources, require_usable
from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import buffer_names, restore_values, results_of, static_size, stored_tensors, tensor_names
from quark_fx.graph.pass_manager import Change, PassRecord
from quark_fx.graph.signature import Signature
from quark_fx.graph.size_condition import SizeCondition
from quark_fx.model.model_directory import read_model, write_model
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.stored_data import LONGEST, listed, mapping, texts
from quark_fx.model.stored_divisions import guard_divisions
from quark_fx.model.stored_operators import (
    DTYPES,
    MEMORY_FORMATS,
    PYTHON,
    operator_name,
    require_fitting,
    require_recurrent_sizes,
    require_small,
    resolve,
    written,
)
from quark_fx.model.stored_provenance import Provenance, Stacks, notes_to_data, provenance_to_data
from quark_fx.model.structures import children_of, structure_from_data, structure_to_data
from quark_fx.plan.report import Row
from quark_fx.system.isolation import isolated, quiet
from quark_fx.system.options import checked_call
from quark_fx.system.untrusted import brief, require_shallow
from quark_fx.system.writable import require_possible, writing

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}", re.ASCII)
"""Pattern of names of nodes and inputs: identifiers in the code that torch generates for a graph."""
_SHORT = 256
"""Maximum length of a stored node name; torch does not limit the names it generates for nested modules."""
_LARGEST = 1 << 42
"""Size in bytes of the largest value that a stored graph may compute."""
_ON_SIZES = frozenset(function for name, function in PYTHON.items() if name != "getitem")
_TORCH = {**DTYPES, **MEMORY_FORMATS, "strided": torch.strided}
_FLOATS = {name: float(name) for name in ("inf", "-inf", "nan")}

T = TypeVar("T")


def save_model(qmodel: QuantizedModel, directory: Path) -> None:
    """Write `qmodel` to `directory`, creating it, or replace the model there; equal models produce equal files.

    Raises:
        QuarkError: If the directory cannot be written or holds a checkpoint, or the graph has an unregistered operator.
    """
    require_possible(directory)
    gm = qmodel.graph_module
    if (directory / "config.json").exists() and not (directory / GRAPH_FILE).exists():
        raise QuarkError(
            f"{directory} contains a checkpoint, whose tensors would be overwritten; choose another directory"
        )
    tensors = stored_tensors(gm)
    ids = {name: f"t{index}" for index, name in enumerate(tensors)}
    kept_ids = {name: f"t{len(tensors) + index}" for index, name in enumerate(qmodel.kept)}
    names, stacks, nodes = tensor_names(gm), Stacks(), _node_names(gm.graph)
    if long := next((name for name in (*tensors, *names.values(), *qmodel.kept) if len(name) > LONGEST), None):
        raise QuarkError(
            f"the name {brief(long)} has {len(long)} characters, but a saved model allows at most {LONGEST}; shorten "
            "the names of its modules"
        )
    report = qmodel.report()
    document = {
        "signature": _signature_to_data(qmodel.signature),
        "config": _plain(qmodel.config.to_dict()),
        "rows": [_plain(row) for row in report.to_rows()],
        "passes": [_record_to_data(record) for record in report.passes],
        "data": report.about.get("data", ""),
        "rounded_by": qmodel.rounded_by,
        "symbols": (symbols := _Symbols()).sizes,
        "inputs": [_value_to_data(node, symbols) for node in gm.graph.nodes if node.op == "placeholder"],
        "tensors": {ids[name]: names.get(name, name) for name in tensors},
        "buffers": [ids[name] for name in tensors if name in buffer_names(gm)],
        "nodes": [_node_to_data(node, nodes, ids, stacks) for node in gm.graph.nodes],
        "provenance": provenance_to_data(qmodel, ids, kept_ids, stacks),
    }
    try:
        require_shallow(document)
    except ValueError as error:
        raise QuarkError(
            f"the model cannot be saved: {error}, which quark_fx.load would reject; use inputs and outputs with fewer "
            "levels of nesting"
        ) from error
    stored = {ids[name]: tensor for name, tensor in tensors.items()}
    with writing(directory, QuarkError):
        write_model(directory, stored | {kept_ids[name]: tensor for name, tensor in qmodel.kept.items()}, document)


@checked_call
@isolated
def load(
    directory: str | Path, *, device: str | torch.device = "cpu", namespaces: Collection[str] = ()
) -> QuantizedModel:
    """Read a model written by `QuantizedModel.save`; the result computes the same, bit for bit.

    The directory may come from anyone: nothing in it is run or imported, and the graph can only call operators that
    capture and the passes of quark_fx use (`SECURITY.md` lists the promises).

    Args:
        directory: Directory given to `save`.
        device: Device for its tensors.
        namespaces: Operator libraries from which the graph may call any operator that does not write into its
            arguments: your own library, or `"aten"`. Name them only if you trust the graph.

    Raises:
        ConfigError: If the device cannot be used.
        QuarkError: If files are missing, damaged, of another version, or from different models, or call an operator
            that is not allowed.
    """
    directory = Path(directory)
    require_usable(Resources(device=device))
    place = torch.device(device)
    try:
        document, tensors = _read(directory, place)
    except (OSError, SafetensorError, ValueError) as error:
        why = error if os.path.exists(directory) else "it does not exist"
        hint = "" if os.path.exists(directory / GRAPH_FILE) else "; pass a directory that QuantizedModel.save wrote"
        if os.path.exists(directory / "config.json"):
            hint = "; transformers' from_pretrained reads checkpoints"
        raise QuarkError(f"{directory} holds no readable quantized model: {why}{hint}") from error
    try:
        config = QuantConfig.from_dict(document["config"], stored=True)  # reports a missing format before a node does
        provenance = Provenance.of(document["provenance"], tensors)
        gm = _graph_from_data(document, provenance.graph_tensors, provenance, place, frozenset(namespaces))
        return QuantizedModel(
            gm,
            _signature_from_data(document["signature"], document["inputs"], gm),
            config,
            [_built(Row, _restored(row)) for row in listed(document["rows"])],
            [_record_from_data(record) for record in listed(document["passes"])],
            kept=provenance.kept,
            parameter_names=provenance.parameter_names,
            data=str(document.get("data", "")),
            rounded_by=str(document.get("rounded_by", "")),
        )
    except QuarkError as error:
        error.add_note(f"in {directory / GRAPH_FILE}")
        raise
    except Exception as error:  # a damaged graph may cause any error
        why = brief(str(error))
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: {type(error).__name__}: {why}") from error


def _read(directory: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for _ in range(100):  # retries if another process replaces the model between two reads of its tensors
        document, file = read_model(directory)
        try:
            return document, _read_tensors(file, device)
        except FileNotFoundError:
            continue
    raise OSError(f"another process keeps replacing {directory}; wait until it is done")


def _read_tensors(file: Path, device: torch.device) -> dict[str, Tensor]:
    tensors = {}
    with safe_open(file, framework="pt") as stored:  # safetensors knows fewer devices than torch
        for name in stored.keys():  # noqa: SIM118 (not a mapping)
            try:
                tensor = stored.get_tensor(name)
            except (TypeError, RuntimeError, OverflowError) as error:  # dtypes and shapes torch does not support
                raise ValueError(f"{file.name}: {error}") from error
            # Kernels assume that booleans are 0 or 1; a mask with other bytes would make them read out of bounds.
            if tensor.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise ValueError(f"{file.name} contains booleans whose bytes are not 0 or 1")
            tensors[name] = tensor.to(device)
    return tensors


def _node_names(graph: Graph) -> dict[Node, str]:
    """Return a name that `load` accepts for each node: the node's name, or the start of a long name and a number."""
    taken = {node.name for node in graph.nodes if len(node.name) <= _SHORT}
    names: dict[Node, str] = {}
    for index, node in enumerate(graph.nodes):
        name = node.name
        if len(name) > _SHORT:
            name = f"{name[: _SHORT // 2]}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
        names[node] = name
    return names


def _node_to_data(node: Node, names: Mapping[Node, str], ids: Mapping[str, str], stacks: Stacks) -> dict[str, Any]:
    targets = {"get_attr": ids.get(str(node.target)), "placeholder": names[node]}
    target = targets.get(node.op, node.target)
    name = target if isinstance(target, str) else operator_name(target)
    if name is None:
        raise QuarkError(f"the call of {target} at %{node.name} cannot be stored: it is not a registered operator")
    data: dict[str, Any] = {"name": names[node], "op": node.op, "target": name}
    if node.args:
        data["args"] = [_encode(a, names) for a in node.args]
    if node.kwargs:
        data["kwargs"] = {k: _encode(v, names) for k, v in node.kwargs.items()}
    return data | notes_to_data(node, stacks)


def _encode(value: Any, names: Mapping[Node, str]) -> Any:
    if isinstance(value, Node):
        return {"node": names[value]}
    if isinstance(value, tuple | list):
        return [_encode(item, names) for item in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, slice):
        return {"slice": [_encode(part, names) for part in (value.start, value.stop, value.step)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise QuarkError(f"a graph argument of type {type(value).__name__} cannot be stored")


def _decode(value: Any, nodes: Mapping[str, Node], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items() if len(value) == 1 else [("", None)]
    if kind == "slice" and isinstance(content, list) and len(content) == 3:
        return slice(*(_decode(part, nodes, device) for part in content))
    if kind == "device" and isinstance(content, str):
        return device  # the device of the loaded tensors, not of the capture
    tables: dict[str, Mapping[str, Any]] = {"node": nodes, "torch": _TORCH, "float": _FLOATS}
    if kind in tables and isinstance(content, str) and content in tables[kind]:
        return tables[kind][content]
    raise QuarkError(f"the stored graph contains the unknown argument {brief(value)}")


class _Symbols:
    """The dynamic sizes of a graph; each has a number and an example size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._numbers: dict[str, int] = {}

    def of(self, size: torch.SymInt) -> dict[str, int]:
        key = str(size.node.expr)
        if key not in self._numbers:
            self._numbers[key] = len(self.sizes)
            # torch treats sizes of 0 and 1 as fixed.
            self.sizes.append(max(2, int(size.node.hint if size.node.hint is not None else 2)))
        return {"symbol": self._numbers[key]}


def _value_to_data(node: Node, symbols: _Symbols) -> dict[str, Any] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    shape = [symbols.of(d) if static_size(d) is None else int(d) for d in sizes]
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def _graph_from_data(
    document: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: Provenance,
    device: torch.device,
    namespaces: frozenset[str],
) -> GraphModule:
    names = mapping(document["tensors"])
    if set(names) != set(tensors) or any(not re.fullmatch(r"t\d{1,9}", name, re.ASCII) for name in names):
        raise QuarkError(
            "the stored graph and its tensor file must list the same tensors, named t0, t1, ...; save the model again"
        )
    if not all(isinstance(name, str) and len(name) <= LONGEST for name in names.values()):
        raise QuarkError("the stored graph has a tensor whose name is not one line of text")
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        root.register_buffer(name, tensor)
    graph, nodes = Graph(), dict[str, Node]()
    for data in listed(document["nodes"]):
        if "output" in nodes:
            raise QuarkError("the stored graph has nodes after its output")
        node = _node_from_data(mapping(data), graph, nodes, device, tensors, namespaces)
        provenance.annotate(node, data)
        nodes[data["name"] if node.op != "output" else "output"] = node
    if "output" not in nodes:
        raise QuarkError("the stored graph lacks an output")
    gm = GraphModule(root, graph, class_name="CapturedGraph")
    gm.meta["tensor_names"] = dict(names)
    gm.meta["buffers"] = frozenset(texts(document.get("buffers", [])))
    gm.meta["rewrites"] = provenance.rewrites
    _restore(gm, document["symbols"], document["inputs"], device)
    return gm


def _node_from_data(
    data: dict[str, Any],
    graph: Graph,
    nodes: Mapping[str, Node],
    device: torch.device,
    tensors: Mapping[str, Tensor],
    namespaces: frozenset[str],
) -> Node:
    name, op, target = data["name"], data["op"], data["target"]
    args = tuple(_decode(listed(data.get("args", [])), nodes, device))
    kwargs = {key: _decode(value, nodes, device) for key, value in mapping(data.get("kwargs", {})).items()}
    if name in nodes or not _is_name(name):
        raise QuarkError(
            f"the stored graph has a node called {brief(name)}, which is not an allowed name or occurs twice"
        )
    if op == "call_function":
        target = resolve(target, namespaces)
        require_fitting(target, args, kwargs)
        target, args, kwargs = written(target, args, kwargs)
    elif op == "output" and target == "output" and len(args) == 1 and isinstance(args[0], list) and not kwargs:
        args = (tuple(args[0]),)
        if any(not isinstance(item, Node | bool | int | float | str | None) for item in args[0]):
            raise QuarkError(
                f"the stored graph returns {brief(args[0])}, with an item that is neither a node nor a plain value"
            )
    elif kwargs or args or not ((op == "get_attr" and target in tensors) or (op == "placeholder" and _is_name(target))):
        raise QuarkError(f"the stored graph holds a {brief(op)} of {brief(target)}, which is not allowed")
    node = graph.create_node(op, target, args, kwargs, name=name)
    node.meta["stack_trace"] = ""  # the user's paths are not stored
    return node


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not iskeyword(name) and name != "self"


def _restore(gm: GraphModule, symbols: Any, inputs: Any, device: torch.device) -> None:
    sizes = listed(symbols)
    if any(type(size) is not int or not 2 <= size <= 1 << 31 for size in sizes):
        raise QuarkError(f"the stored graph has invalid example values for its variable sizes: {brief(sizes)}")
    examples: list[Tensor | None] = []
    dynamic: list[dict[int, int]] = []
    for data in listed(inputs):
        shape = _shape(data, len(sizes))
        example = [size if isinstance(size, int) else sizes[size["symbol"]] for size in shape]
        if data is not None and math.prod(example) > _LARGEST:
            raise QuarkError(f"the stored graph has an input of shape {brief(example)}, which is too large")
        dtype = None if data is None else DTYPES[data["dtype"]]
        # The meta device allocates no memory; the fake tensor of the example is on `device`.
        examples.append(None if dtype is None else torch.empty(example, dtype=dtype, device="meta"))
        dynamic.append({i: size["symbol"] for i, size in enumerate(shape) if not isinstance(size, int)})
    if len(examples) != sum(node.op == "placeholder" for node in gm.graph.nodes):
        raise QuarkError("the stored graph has a different number of inputs than of input shapes")
    reason = None
    with quiet():  # torch prints errors that are recorded here
        try:
            restore_values(gm, examples, dynamic, _require_computable, device=device)
        except _LimitError:
            raise
        except Exception as error:  # an operator without symbolic shapes may raise any error
            reason = str(error).partition("\n")[0]
            restore_values(gm, examples, [{}] * len(dynamic), _require_computable, device=device)
        guard_divisions(gm)
    if reason is not None:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
        gm.meta["no_shapes"] = reason


class _LimitError(QuarkError):
    """An error for graphs that take unlimited memory or time, or whose kernels would read memory out of bounds."""


def _require_computable(node: Node, values: Sequence[Any]) -> None:
    """Reject tensors of terabytes, huge integers, tensors in place of sizes, and recurrent weights of wrong shapes."""
    if node.target in _ON_SIZES and any(isinstance(value, Tensor) for value in values):
        raise _LimitError(f"the stored graph uses tensors as sizes at %{node.name}")
    try:
        require_recurrent_sizes(node.target, node.args, node.kwargs)
    except QuarkError as error:
        raise _LimitError(f"{error} at %{node.name}") from None
    if node.target is PYTHON["pow"]:
        exponent: Any = node.args[-1]
        values = [*values, exponent.meta.get("val") if isinstance(exponent, Node) else exponent]
        if isinstance(values[-1], int) and not -64 <= values[-1] <= 64:
            raise _LimitError(
                f"the stored graph raises to the power {brief(values[-1])} at %{node.name}; the limit is 64"
            )
    for value in values:
        if isinstance(value, Tensor):
            sizes: list[Any] = list(value.shape)
            hints = [int(d) if static_size(d) is not None else int(d.node.hint or 2) for d in sizes]
            if math.prod(hints) * value.element_size() > _LARGEST:
                raise _LimitError(
                    f"the stored graph computes a tensor of shape {brief(hints)} at %{node.name}, which is too large"
                )
        elif isinstance(value, int):
            try:
                require_small(value)
            except QuarkError as error:
                raise _LimitError(f"{error} at %{node.name}") from None


def _shape(data: Any, symbols: int) -> list[Any]:
    if data is None:
        return []
    shape = listed(mapping(data)["shape"])
    checks = [
        (type(size) is int and 0 <= size <= 1 << 40)
        or (isinstance(size, dict) and list(size) == ["symbol"] and size["symbol"] in range(symbols))
        for size in shape
    ]
    if not all(checks) or data["dtype"] not in DTYPES or len(shape) > 64:
        raise QuarkError(f"the stored graph has an invalid description of an input: {brief(data)}")
    return shape


def _signature_to_data(signature: Signature) -> dict[str, Any]:
    try:
        structures = [structure_to_data(spec) for spec in (signature.in_spec, signature.out_spec)]
    except QuarkError as error:
        raise QuarkError(
            f"the structure of the model's inputs or outputs cannot be stored: {error}, or let the model return "
            "tuples, lists, or dicts"
        ) from error
    return {
        "in_structure": structures[0],
        "out_structure": structures[1],
        "parameters": list(signature.parameters),
        "input_names": list(signature.input_names),
        "output_names": list(signature.output_names),
        "input_constants": {name: _encode(value, {}) for name, value in signature.input_constants.items()},
        "input_limits": [list(limit) for limit in signature.input_limits],
        "input_conditions": [[condition.text, condition.place] for condition in signature.input_conditions],
        "fixed_arguments": {name: _encode(value, {}) for name, value in signature.fixed_arguments.items()},
    }


def _signature_from_data(data: Any, inputs: list[Any], gm: GraphModule) -> Signature:
    data = mapping(data)
    in_spec, out_spec = structure_from_data(data["in_structure"]), structure_from_data(data["out_structure"])
    names, outputs = texts(data["input_names"]), texts(data["output_names"])
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results = results_of(gm)
    positions = children_of(in_spec)
    if len(positions) != 2 or [spec.type for spec in (in_spec, *positions)] != [tuple, tuple, dict]:
        raise QuarkError("the inputs of the stored model are not positional arguments and keywords")
    if not (in_spec.num_leaves == len(names) == len(places) == len(inputs)) or len(set(names)) < len(names):
        raise QuarkError("the stored model has a different number of inputs than its graph, or lists one twice")
    if not out_spec.num_leaves == len(outputs) == len(results):
        raise QuarkError("the stored model has a different number of outputs than its graph")
    ranks = {name: 0 if value is None else len(value["shape"]) for name, value in zip(names, inputs, strict=True)}
    limits: list[Any] = [tuple(listed(limit)) for limit in listed(data["input_limits"])]
    for limit in limits:
        whole = len(limit) == 4 and all(type(n) is int for n in limit[1:3]) and type(limit[3]) in (int, type(None))
        if not whole or limit[0] not in ranks or not 0 <= limit[1] < ranks[limit[0]]:
            raise QuarkError(f"the stored model has an invalid size limit for an input: {brief(limit)}")
    stored = [texts(condition) for condition in listed(data.get("input_conditions", []))]
    if any(len(condition) != 2 for condition in stored):
        raise QuarkError(f"the stored model has an invalid list of size conditions: {brief(stored)}")
    conditions = [SizeCondition(text, place) for text, place in stored]
    for condition in conditions:
        try:
            condition.holds({name: [1] * rank for name, rank in ranks.items()})
        except ValueError as error:
            raise QuarkError(
                f"the stored model has an invalid size condition {brief(condition.text)}: {error}"
            ) from error
    return Signature(
        in_spec=in_spec,
        out_spec=out_spec,
        parameters=texts(data["parameters"]),
        input_names=names,
        output_names=outputs,
        input_shapes=tuple(
            None if value is None else tuple(size if isinstance(size, int) else None for size in value["shape"])
            for value in inputs
        ),
        input_dtypes=tuple(None if value is None else DTYPES[value["dtype"]] for value in inputs),
        input_constants={name: _constant(value) for name, value in mapping(data["input_constants"]).items()},
        input_limits=tuple(limits),
        input_conditions=tuple(conditions),
        fixed_arguments={name: _constant(value) for name, value in mapping(data["fixed_arguments"]).items()},
    )


def _constant(value: Any) -> Any:
    return _decode(value, {}, torch.device("cpu"))


def _plain(value: Any) -> Any:
    """Return a value from a configuration or report as data that JSON can store."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    # Options of the user's passes may have any type; only their text is stored.
    return value if value is None or isinstance(value, bool | int | float | str) else {"repr": repr(value)[:LONGEST]}


def _restored(value: Any) -> Any:
    """Undo `_plain` for a mapping whose values are plain data or floats that are not finite."""
    return {key: _constant(item) for key, item in mapping(value).items()}


def _record_to_data(record: PassRecord) -> dict[str, Any]:
    data = _plain(asdict(record))
    for part in (data, *data["changes"]):
        del part["seconds"]  # equal models produce equal files, whatever their run time
    return data  # type: ignore[no-any-return]


def _record_from_data(data: Any) -> PassRecord:
    untold = {"seconds": math.nan}
    changes = tuple(_built(Change, _restored(change) | untold) for change in listed(mapping(data)["changes"]))
    rest = {key: value for key, value in data.items() if key != "changes"}
    return _built(PassRecord, _restored(rest) | untold, changes=changes)


_KINDS = {"str": str, "int": int, "bool": bool, "float": int | float, "None": None}


def _built(cls: type[T], data: dict[str, Any], **rest: Any) -> T:
    """Return a dataclass from data, after a check of the types against the annotations of its fields."""
    kinds = {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]
    for key, value in data.items():
        types = [_KINDS[kind] for kind in kinds.get(key, "").split(" | ") if kind in _KINDS]
        if not any(value is None if kind is None else isinstance(value, kind) for kind in types):
            raise QuarkError(
                f"the stored report holds {key[:80]}={brief(value)}, which is not valid for {cls.__name__}"
            )
    return cls(**data, **rest)


__all__ = ["load", "save_model"]
