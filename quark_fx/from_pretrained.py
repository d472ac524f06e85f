"""`QuarkFxConfig`, with which transformers' `from_pretrained` quantizes a model while it loads the model.

`quark_fx` does not import this module, because it needs transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quark_fx.checkpoints.configuration import METHOD
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.resources import IN_RESOURCES, Resources, require_usable
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.quantization import needs_data, quantize, resolve
from quark_fx.system.options import require_names

_OPTIONS = ("resources", "dynamic_shapes", "verify", "progress")
"""Names of the options that are passed to `quantize`."""

_RESOURCES = ("device", "cache", "checkpoint", "memory")
"""Fields of `Resources` that apply; the others do not, because one process has already loaded the model."""


class QuarkFxConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Value of `quantization_config` with which transformers' `from_pretrained` quantizes a model.

    The loaded model has the class of the float model, like the result of `QuantizedModel.eager`. For the report,
    `quark_fx.export`, and `save`, use the quantized model `model.hf_quantizer.qmodel`. Float weights are also quantized
    if their `config.json` contains such a configuration as a dictionary, for example `{"quant_method": "quark_fx",
    "config": "int8_dynamic"}`. transformers rejects checkpoints that are already quantized. If a model does not fit
    into memory, pass the directory of its checkpoint to `quantize` instead.

    Args:
        config: Name of a preset, a `QuantConfig`, or its `to_dict()`.
        calibration_data: Batches, in the forms that `quantize` accepts. They are optional if the configuration learns
            nothing from data and the model reads tokens.
        kernels: Whether to use the kernels of `compile()`, for inference on a CPU; see `QuantizedModel.eager`.
        options: Arguments of `quantize`: `resources` (its `device`, `cache`, `checkpoint`, and `memory`),
            `dynamic_shapes`, `verify`, and `progress`.

    Raises:
        ConfigError: If a preset or an option is unknown.
        CalibrationError: If the configuration needs calibration data and does not get any.
    """

    quant_method: Any = METHOD

    def __init__(
        self,
        config: str | QuantConfig | Mapping[str, Any],
        calibration_data: Iterable[Any] | None = None,
        *,
        kernels: bool = False,
        **options: Any,
    ) -> None:
        self.config, self.calibration_data, self.kernels = resolve(config), calibration_data, kernels
        self.options = options
        names = ("config", "calibration_data", "kernels", *_OPTIONS)
        require_names("QuarkFxConfig", options, names, IN_RESOURCES)
        require_usable(options.get("resources", Resources()), "QuarkFxConfig", _RESOURCES)
        if not isinstance(kernels, bool):
            raise ConfigError(f"kernels of QuarkFxConfig must be True or False, not {kernels!r}")
        if calibration_data is None and needs_data(self.config):
            raise CalibrationError(
                "this configuration needs calibration data: pass batches, as in QuarkFxConfig(config, batches)"
            )

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the configuration that `to_dict` describes, without calibration data."""
        arguments = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(arguments, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the model's `config.json`; it does not contain calibration data or options."""
        return {"quant_method": METHOD, "config": self.config.to_dict(), "kernels": self.kernels}

    def __deepcopy__(self, memo: Any) -> QuarkFxConfig:
        return self  # copies of a model share the calibration data


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer that transformers calls after it has loaded the weights.

    Attributes:
        qmodel: Quantized model.
    """

    quantization_config: QuarkFxConfig
    qmodel: QuantizedModel

    def __init__(self, quantization_config: QuarkFxConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs | {"pre_quantized": False})

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Check that `device_map` does not distribute the model over several devices.

        Raises:
            ConfigError: If it does.
        """
        if isinstance(device_map, Mapping):  # transformers resolves "auto" and other names later
            _require_one_device(device_map)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        config = self.quantization_config
        _require_one_device(getattr(model, "hf_device_map", {}))
        data = _example(model) if config.calibration_data is None else config.calibration_data
        self.qmodel = quantize(model, config.config, data, **config.options)
        # The caller has a reference to this object, so the object gets all attributes of the result of `eager`.
        vars(model).update(vars(self.qmodel.eager(kernels=config.kernels)) | {"hf_quantizer": self})
        return model

    def is_serializable(self) -> bool:
        """Return False, because `save_pretrained` cannot write the model; its error names the methods that can."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: `Trainer` cannot train the model; use `prepare_qat` instead."""
        return False

    def __deepcopy__(self, memo: Any) -> Quantizer:
        return self


def _require_one_device(places: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if modules are on several devices, between which transformers' hooks would move tensors."""
    if len({*places.values()}) > 1:
        devices = ", ".join(sorted({str(place) for place in places.values()}))
        raise ConfigError(
            f"device_map distributes the model over {devices}, but a quantized model is on one device: load it with "
            "device_map='cpu', and pass QuarkFxConfig(..., resources=Resources(device='cuda')) to run its blocks there"
        )


def _example(model: PreTrainedModel) -> list[Any]:
    """Return a list with one batch for capture; raise `CalibrationError` if the model reads more than tokens."""
    reads_tokens = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    if not reads_tokens or getattr(model, "input_modalities", "text") not in ("text", ("text",), ["text"]):
        raise CalibrationError(
            f"{type(model).__name__} takes inputs other than tokens: pass an example batch of its inputs, as in "
            "QuarkFxConfig(config, [batch])"
        )
    return [dict(model.dummy_inputs)]


# These functions are not used as decorators, because they would hide the types of the classes.
register_quantization_config(METHOD)(QuarkFxConfig)
register_quantizer(METHOD)(Quantizer)

__all__ = ["QuarkFxConfig"]
