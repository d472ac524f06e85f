"""Run a quantized model on PyTorch's native int8, int4, and FP8 kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor import config as inductor

from quark_fx.errors import ConfigError, QuarkError
from quark_fx.graph.nodes import device_of
from quark_fx.graph.signature import Signature
from quark_fx.model.kernels.lowering import KernelReport, has_rules, use_kernels
from quark_fx.model.kernels.modules import require_unchanged
from quark_fx.model.kernels.residual import CONVOLVE_ONTO
from quark_fx.system.isolation import warn

if TYPE_CHECKING:
    from quark_fx.model.quantized_model import QuantizedModel


class CompiledModel(nn.Module):
    """A quantized graph with torch's kernels, which `torch.compile` compiles at the first call.

    Inference only. Save the original QuantizedModel, not this one.

    Attributes:
        graph_module: Graph without `quantize` and `dequantize` operators; it also runs uncompiled.
        signature: Call signature of the model.
    """

    def __init__(self, graph_module: torch.fx.GraphModule, signature: Signature, report: KernelReport, **options: Any):
        super().__init__()
        self.graph_module, self.signature, self._report = graph_module, signature, report
        self._warned = False
        self._freezing = any(row.packed for row in report)
        self._pre_pass: Any = None
        if any(node.target is CONVOLVE_ONTO for node in graph_module.graph.nodes):
            from quark_fx.model.kernels.in_place import AddInPlace  # loads sympy

            self._pre_pass = AddInPlace()
        if "mode" not in options and options.get("backend", "inductor") == "inductor":
            options["options"] = {"guard_filter_fn": _guards} | dict(options.get("options") or {})
        try:
            self._run = torch.compile(graph_module, fullgraph=True, **options)
        except RuntimeError as error:  # torch's list of known options fills pages
            reason = str(error).partition(", known options")[0]
            raise ConfigError(f"torch.compile does not accept {options}: {reason}") from error
        self.eval()

    @classmethod
    def of(cls, qmodel: QuantizedModel, **options: Any) -> CompiledModel:
        """Return the compiled form of a quantized model.

        Raises:
            QuarkError: If the model is neither on a CPU nor on an NVIDIA GPU.
        """
        if not has_rules(device := device_of(qmodel.graph_module)):
            raise QuarkError(
                f"compile() has kernels for CPUs and NVIDIA GPUs, and the model is on {device}; move it: qmodel.cpu()"
            )
        graph_module, report = use_kernels(qmodel.graph_module)
        return cls(graph_module, qmodel.signature, report, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; inputs and outputs have the same structure as in the original model.

        Raises:
            QuarkError: If the inputs differ in structure, rank, fixed dimensions, or dtype.
        """
        # torch would compile again for another memory layout, and for inputs that require gradients.
        leaves = [
            leaf.detach().contiguous() if isinstance(leaf, Tensor) else leaf
            for leaf in self.signature.flatten(args, kwargs)
        ]
        # torch reads these settings when it compiles a call with new sizes; packed weights must be frozen constants.
        pre_pass = inductor.post_grad_custom_pre_pass or self._pre_pass  # a pass that the user set takes precedence
        with torch.no_grad(), inductor.patch(freezing=self._freezing, post_grad_custom_pre_pass=pre_pass):
            try:
                return self.signature.unflatten(self._run(*leaves))
            except FailOnRecompileLimitHit:
                if not self._warned:
                    warn(
                        f"torch has compiled this model for {dynamo.recompile_limit} input sizes and reached its "
                        "limit; other sizes run uncompiled, which is slower; call compile(dynamic=True), or raise "
                        "torch._dynamo.config.recompile_limit"
                    )
                self._warned = True
                return self.signature.unflatten(self.graph_module(*leaves))

    def compile(self, **options: Any) -> NoReturn:
        """Raise an error: the model is already compiled.

        Raises:
            QuarkError: Always.
        """
        raise QuarkError("this model is compiled already; for other options, compile the quantized model again")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompiledModel:
        device = device_of(self.graph_module)
        kinds = {(dtype, device) for dtype in (torch.float32, *(tensor.dtype for tensor in self.buffers()))}
        require_unchanged(fn, kinds, "a compiled model", "compile the quantized model again")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuarkError(
            "a compiled model has packed weights, which cannot be copied or pickled; save the quantized model, load it "
            "at the destination, and compile it again there"
        )

    def report(self) -> KernelReport:
        """Return one row per operator with a quantized weight: its kernel, or the reason why it lacks one."""
        return self._report


def _guards(entries: Sequence[Any]) -> list[bool]:
    """Select the guards that torch checks at every call: all guards except the ones on the graph's tensors."""
    return [not entry.name.startswith("self.") for entry in entries]


__all__ = ["CompiledModel"]
