"""The result of quantization: a graph that runs, reports on itself, and can be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import QuantConfig
from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import own_tensors
from quark_fx.graph.pass_manager import PassRecord, copy_graph
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
        graph_module: the graph with `quark_fx::quantize` and `dequantize`, flat inputs and outputs.
        signature: how the model is called.
        config: what it was quantized with.
        source: the module it was made of, for `eager`, without the weights that the graph has; `None` if it was loaded.
        kept: parameters and buffers of the model that the graph has only in constants computed from them, by name.
        parameter_names: those of all parameters of the model, `None` if they are not known.
        sample: Flat inputs that a written file is run with once: the first samples of the first batch. `None` if the
            model was loaded, since stored models hold no data.
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
    ) -> None:
        super().__init__()
        object.__setattr__(self, "source", source)  # not a submodule: its parameters are no state of this one
        self.kept, self.parameter_names, self.sample = kept, parameter_names, sample
        self.graph_module = graph_module
        self.signature = signature
        self.config = config
        named = next(
            (name for name, known in PRESETS.items() if known == config), f"no preset, weights {config.weight}"
        )
        about = {"model": type(source).__name__} if source is not None else {}
        about |= {"configuration": named, "target": config.target.name}
        self._report = Report(tuple(rows), tuple(passes), tuple(histograms), about)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the quantized graph; inputs and outputs are those of the original model.

        Gradients of inputs are straight-through: rounding counts as the identity within the clip range of an
        activation. For those of weights see `quark_fx.prepare_qat`.

        Raises:
            QuarkError: if the inputs differ in structure, rank, fixed dimensions or dtype.
        """
        leaves = self.signature.flatten(args, kwargs)
        if records_gradients(*leaves):
            return self.signature.unflatten(run_with_gradients(self.graph_module, *leaves))
        return self.signature.unflatten(self.graph_module(*leaves))

    def run_batch(self, batch: Any) -> Any:
        """Run a batch as calibration data is given: a tensor, a tuple of positions or a mapping of keywords."""
        args, kwargs = split_batch(batch)
        with torch.no_grad():
            return self(*args, **kwargs)

    def report(self) -> Report:
        """Return one row per weighted operator: how it was quantized, or why not."""
        return self._report

    @checked_call
    def save(self, directory: str | Path) -> None:
        """Write the graph, tensors and configuration to `directory`; `quark_fx.load` reads them back.

        Other files there stay as they are (`Resources(output_dir=...)` refuses a directory that has some).

        Raises:
            QuarkError: if the directory cannot be written.
        """
        from quark_fx.model.serialization import save_model

        save_model(self, Path(directory))

    def eager(self, model: nn.Module | None = None, *, kernels: bool = False) -> nn.Module:
        """Return the original model, of its own class, computing what this one does: `generate` works on it.

        Args:
            model: a float model of the same class and configuration, with any weights, where this one was loaded.
            kernels: run linear layers on the kernels that `compile()` uses, and look codes of embeddings up. The
                result is for inference, on a CPU or an NVIDIA GPU; its attribute `kernel_report` has one row per
                operator, as the report of a compiled model: its kernel, or why it is simulated. Results differ from the
                simulated ones by the order of sums, and in bfloat16 by its rounding. On a CPU the first call with
                one row, a decoding step, compiles. `torch.compile` works on it.

        Raises:
            QuarkError: if no module computes what the graph does; the message names the operator.
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

        What has no kernel is computed in floats, as here; `report()` of the result says why, by operator. The result
        is a snapshot: later changes of this model do not reach it. The first call, and the first one with a new batch
        size, compile, which takes about a minute for a network of 50 layers.

        Args:
            mode: as in `torch.compile`, such as `"max-autotune"`.
            dynamic: likewise.
            backend: likewise; default Inductor, which needs a C++ compiler.
            options: likewise, of the backend.

        Raises:
            ConfigError: for an option that does not exist, or a value of another type.
            QuarkError: for a model that is neither on a CPU nor on an NVIDIA GPU.
        """
        from quark_fx.model.compiled_model import CompiledModel

        given = {"mode": mode, "dynamic": dynamic, "backend": backend, "options": options}
        return CompiledModel.of(self, **{name: value for name, value in given.items() if value is not None})

    def train(self, mode: bool = True) -> QuantizedModel:
        """Stay in eval mode: the graph was captured in it.

        Raises:
            RuntimeError: for `mode=True`.
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
            "a QuantizedModel is not pickled, and so neither torch.save nor another process takes it: write it with "
            "qmodel.save(directory) and read it with quark_fx.load(directory), or save its state_dict()"
        )

    def with_graph(
        self, graph_module: GraphModule, rows: Sequence[Row] | None = None, passes: Sequence[PassRecord] | None = None
    ) -> QuantizedModel:
        """Return a model of another graph with the same names; the report is this one's where none is given."""
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
