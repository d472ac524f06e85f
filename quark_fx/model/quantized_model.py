"""The result of quantization: a graph that can be run, reported on, and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from quark_fx.checkpoints.open_checkpoint import ROUNDED_BY
from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import QuantConfig
from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import own_tensors
from quark_fx.graph.pass_manager import PassRecord, copy_graph
from quark_fx.graph.random_draws import random_draws
from quark_fx.graph.sample import Sample
from quark_fx.graph.signature import Signature, split_batch
from quark_fx.graph.straight_through import records_gradients, run_with_gradients
from quark_fx.plan.report import Histogram, Report, Row
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    from quark_fx.model.compiled_model import CompiledModel


class QuantizedModel(nn.Module):
    """A quantized graph, called like the model it was captured from.

    Attributes:
        graph_module: Graph with the operators `quark_fx::quantize` and `dequantize`, and flat inputs and outputs.
        signature: Call signature of the model.
        config: Configuration of the quantization.
        source: Original module for `eager`, without the weights that the graph stores; `None` in a loaded model.
        kept: Parameters and buffers from which constants of the graph were computed, keyed by path.
        parameter_names: Names of all parameters of the model, `None` if unknown.
        sample: Flat inputs with which an exported file is run once: the first samples of the first batch. `None` if the
            model was loaded, since stored models contain no data.
        data: Description of the calibration data, for the report; empty without data.
        rounded_by: Method with which the model's checkpoint had been quantized before; empty if it was in float.
    """

    source: nn.Module | None

    def __init__(
        self,
        graph_module: GraphModule,
        signature: Signature,
        config: QuantConfig,
        rows: Sequence[Row],
        passes: Sequence[PassRecord] = (),
        source: nn.Module | None = None,
        *,
        histograms: Sequence[Histogram] = (),
        kept: Mapping[str, Tensor] = MappingProxyType({}),
        parameter_names: frozenset[str] | None = None,
        sample: Sample | None = None,
        data: str = "",
        rounded_by: str = "",
    ) -> None:
        super().__init__()
        object.__setattr__(self, "source", source)  # not a submodule: its parameters are not state of this model
        self.kept, self.parameter_names, self.sample = kept, parameter_names, sample
        self.graph_module = graph_module
        self.signature = signature
        self.config = config
        named = next(
            (name for name, preset in PRESETS.items() if preset == config), f"no preset, weights {config.weight}"
        )
        about = {"model": type(source).__name__} if source is not None else {}
        about |= {"configuration": named, "target": config.target.name} | ({"data": data} if data else {})
        if method := rounded_by or getattr(source, ROUNDED_BY, ""):
            about["source"] = f"already rounded by {method}: both rounding errors add up"
        self.rounded_by: str = method
        draws = random_draws(graph_module, signature.output_names)
        # Equal rows of a weight are merged; equal rows without a parameter belong to different products of activations.
        unique = {row if row.parameter else number: row for number, row in enumerate(rows)}.values()
        self._report = Report(tuple(unique), tuple(passes), tuple(histograms), about, draws)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the quantized graph; inputs and outputs have the same structure as in the original model.

        Gradients of inputs are straight-through: rounding counts as the identity within the clip range of an
        activation. For gradients of weights, see `quark_fx.prepare_qat`.

        Raises:
            QuarkError: If the inputs differ in structure, rank, fixed dimensions, or dtype.
        """
        leaves = self.signature.flatten(args, kwargs)
        if records_gradients(*leaves):
            return self.signature.unflatten(run_with_gradients(self.graph_module, *leaves))
        return self.signature.unflatten(self.graph_module(*leaves))

    def run_batch(self, batch: Any) -> Any:
        """Run a batch of calibration data: a tensor, a tuple of positional inputs, or a mapping of keyword inputs."""
        args, kwargs = split_batch(batch)
        with torch.no_grad():
            return self(*args, **kwargs)

    def report(self) -> Report:
        """Return a report with a row per weight and use: its quantization, or the reason why it stays in float."""
        return self._report

    @checked_call
    def save(self, directory: str | Path) -> None:
        """Write the graph, tensors, and configuration to `directory`; `quark_fx.load` reads them.

        Other files there do not change (`Resources(output_dir=...)` rejects a directory with other files).

        Raises:
            QuarkError: If the directory cannot be written.
        """
        from quark_fx.model.serialization import save_model

        save_model(self, Path(directory))

    def eager(self, model: nn.Module | None = None, *, kernels: bool = False) -> nn.Module:
        """Return a model of the original class that computes the same as this one; its `generate` works.

        Args:
            model: Float model with the same class and configuration and any weights, if this model was loaded.
            kernels: Whether linear layers use the kernels of `compile()`, and embeddings look up codes. Such a model is
                for inference, on a CPU or an NVIDIA GPU; its attribute `kernel_report` has one row per operator, like
                the report of a compiled model: its kernel, or the reason for simulating it. Results differ from
                simulated ones in the order of sums and, in bfloat16, in rounding. On a CPU, the first decoding step (a
                call with one row) compiles. `torch.compile` accepts the model.

        Raises:
            QuarkError: If the graph contains a computation that no module performs; the message names the operator.
        """
        from quark_fx.model.eager import eager

        return eager(self, model, kernels=kernels)

    @checked_call
    def compile(  # type: ignore[override]
        self,
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        backend: str | Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> CompiledModel:
        """Compile this model for inference on a CPU or an NVIDIA GPU, where int8 layers multiply integers.

        Operators without a kernel are computed in float, as in this model; `report()` of the result gives the reason
        for each. The result is a snapshot: later changes of this model do not affect it. The first call, and the first
        call with a new batch size, compile, which takes about a minute for a network of 50 layers.

        Args:
            mode: Argument of `torch.compile`, such as `"max-autotune"`.
            dynamic: Argument of `torch.compile`.
            backend: Argument of `torch.compile`; default Inductor, which needs a C++ compiler.
            options: Options of the backend, an argument of `torch.compile`.

        Raises:
            ConfigError: If an option does not exist, or has a value of another type.
            QuarkError: If the model is neither on a CPU nor on an NVIDIA GPU.
        """
        from quark_fx.model.compiled_model import CompiledModel

        arguments = {"mode": mode, "dynamic": dynamic, "backend": backend, "options": options}
        return CompiledModel.of(self, **{name: value for name, value in arguments.items() if value is not None})

    def train(self, mode: bool = True) -> QuantizedModel:
        """Stay in eval mode, in which the graph was captured.

        Raises:
            RuntimeError: If `mode` is true.
        """
        if mode:
            raise RuntimeError(
                "a quantized graph is captured in eval mode; to train it, call quark_fx.prepare_qat(qmodel)"
            )
        super().train(False)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModel:
        if fn(torch.zeros((), dtype=torch.float32)).dtype != torch.float32:
            raise RuntimeError("the scales of a quantized model are float32; convert the model before quantizing it")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.kept = {name: fn(tensor) for name, tensor in self.kept.items()}
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuarkError(
            "a QuantizedModel cannot be pickled, so torch.save and other processes do not accept it: write it with "
            "qmodel.save(directory) and read it with quark_fx.load(directory), or save its state_dict()"
        )

    def with_graph(
        self, graph_module: GraphModule, rows: Sequence[Row] | None = None, passes: Sequence[PassRecord] | None = None
    ) -> QuantizedModel:
        """Return a model with another graph that has the same names; rows and passes default to this model's."""
        return type(self)(
            graph_module,
            self.signature,
            self.config,
            self._report.rows if rows is None else rows,
            self._report.passes if passes is None else passes,
            self.source,
            histograms=self._report.histograms,
            kept=self.kept,
            parameter_names=self.parameter_names,
            sample=self.sample,
        )

    def __copy__(self) -> QuantizedModel:
        return self.with_graph(self.graph_module)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        return self.with_graph(own_tensors(copy_graph(self.graph_module)))
