"""Remove the traces of torch's exporter: numbers as names of sizes, and its notes."""

from __future__ import annotations

import itertools

import onnx_ir as ir


def settle_sizes(model: ir.Model) -> None:
    """Store the size of a dimension that does not vary after all as a number; torch leaves the number as a name."""
    values = itertools.chain(model.graph.inputs, *(node.outputs for node in model.graph.all_nodes()))
    for value in values:
        shape = value.shape or ir.Shape(())
        for axis, size in enumerate(shape):
            if isinstance(size, ir.SymbolicDim) and size.value is not None and size.value.isdecimal():
                shape[axis] = int(size.value)


def strip_metadata(model: ir.Model) -> None:
    """Remove the exporter's notes (stack traces, signatures), which outweigh the weights of a small model."""
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                value.metadata_props.clear()
