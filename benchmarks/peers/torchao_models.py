"""Models that torchao quantizes, by the ways its documentation shows for processors.

Source: https://docs.pytorch.org/ao, "PyTorch 2 Export Quantization with X86 Backend through Inductor" and "Quantized
Inference".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def int8_static(model: nn.Module, calibration: Sequence[Batch]) -> Any:
    """Return an int8 graph in the operators of PT2E: `X86InductorQuantizer` with its default configuration.

    It takes batches of the size of the calibration's only.
    """
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    with torch.no_grad():
        graph = torch.export.export(model, (), calibration[0], strict=True).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(graph, quantizer)
        for batch in calibration:
            prepared(**batch)
        converted = convert_pt2e(prepared)
    move_exported_model_to_eval(converted)
    return converted


def int4_weights(model: nn.Module, group_size: int, algorithm: str) -> nn.Module:
    """Return a copy whose linear layers have int4 weights in torch's packed form, with offsets.

    Args:
        model: on the CPU, in float32 or bfloat16.
        group_size: inputs that share a scale.
        algorithm: `"tinygemm"` or `"hqq"`.
    """
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm

    chosen = Int4ChooseQParamsAlgorithm(algorithm)
    result = copy.deepcopy(model)
    quantize_(
        result,
        PrototypeInt4WeightOnlyConfig(
            group_size=group_size, int4_choose_qparams_algorithm=chosen, set_inductor_config=False
        ),
    )
    return result


def decoded(model: nn.Module) -> nn.Module:
    """Return a model of `int4_weights`, in bfloat16, with plain weights: those that its kernels multiply by."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and type(module.weight.data) is not Tensor:
                rows = torch.eye(module.in_features, dtype=torch.bfloat16)
                weight = nn.functional.linear(rows, module.weight).mT.contiguous()
                module.weight = nn.Parameter(weight, requires_grad=False)
    return model
