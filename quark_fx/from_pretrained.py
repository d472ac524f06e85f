"""`QuarkFxConfig`: quantize a model while `from_pretrained` of transformers loads it.

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
"""Arguments of `quantize` that are passed on."""

_RESOURCES = ("device", "cache", "checkpoint", "memory")
"""Fields of `Resources` that apply: the model is loaded already, by one process."""


class QuarkFxConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Configuration with which `from_pretrained` of transformers quantizes a model: its `quantization_config`.

    The loaded model has the class of the float model, like the result of `QuantizedModel.eager`. For the report,
    `quark_fx.export`, and `save`, use the quantized model `model.hf_quantizer.qmodel`. Float weights are also quantized
    if their `config.json` contains the dictionary of a configuration, `{"quant_method": "quark_fx", "config":
    "int8_dynamic"}`. transformers refuses checkpoints that are quantized already. For a model that does not fit into
    memory, quantize its directory instead (`open_checkpoint`).

    Args:
        config: Name of a preset, a `QuantConfig`, or its `to_dict()`.
        calibration_data: Batches, in the forms that `quantize` accepts. A configuration that learns nothing from data
            needs none if the model reads tokens.
        kernels: Whether to use the kernels of `compile()`, for inference on a CPU; see `QuantizedModel.eager`.
        options: Arguments of `quantize`: `resources` (its `device`, `cache`, `checkpoint`, and `memory`),
            `dynamic_shapes`, `verify`, and `progress`.

    Raises:
        ConfigError: For an unknown preset or option.
        CalibrationError: If the configuration needs calibration data and gets none.
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
            raise ConfigError(f"kernels of QuarkFxConfig is True or False, not {kernels!r}")
        if calibration_data is None and needs_data(self.config):
            raise CalibrationError(
                "this configuration needs calibration data: pass batches, as QuarkFxConfig(config, batches)"
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
    """Quantizer that transformers calls after it loaded the weights.

    Attributes:
        qmodel: Quantized model.
    """

    quantization_config: QuarkFxConfig
    qmodel: QuantizedModel

    def __init__(self, quantization_config: QuarkFxConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs | {"pre_quantized": False})

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse a `device_map` that distributes the model over several devices.

        Raises:
            ConfigError: For such a `device_map`.
        """
        if isinstance(device_map, Mapping):  # "auto" and other words are resolved later
            _require_one_device(device_map)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        config = self.quantization_config
        _require_one_device(getattr(model, "hf_device_map", {}))
        data = _example(model) if config.calibration_data is None else config.calibration_data
        self.qmodel = quantize(model, config.config, data, **config.options)
        # The caller holds this object, so it gets all attributes of the result of `eager`.
        vars(model).update(vars(self.qmodel.eager(kernels=config.kernels)) | {"hf_quantizer": self})
        return model

    def is_serializable(self) -> bool:
        """Return False: `save_pretrained` cannot write the model. Its error names the methods that can."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False: `Trainer` cannot train the model; use `prepare_qat` instead."""
        return False

    def __deepcopy__(self, memo: Any) -> Quantizer:
        return self


def _require_one_device(places: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if modules are on several devices: transformers then moves tensors between them in hooks."""
    if len({*places.values()}) > 1:
        devices = ", ".join(sorted({str(place) for place in places.values()}))
        raise ConfigError(
            f"device_map distributes the model over {devices}, but a quantized model is on one device: load it with "
            "device_map='cpu', and pass QuarkFxConfig(..., resources=Resources(device='cuda')) to run its blocks there"
        )


def _example(model: PreTrainedModel) -> list[Any]:
    """Return a batch to capture a model with, or raise `CalibrationError` if it reads more than tokens."""
    reads_tokens = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    if not reads_tokens or getattr(model, "input_modalities", "text") not in ("text", ("text",), ["text"]):
        raise CalibrationError(
            f"{type(model).__name__} reads more than tokens: pass a batch of its inputs, as "
            "QuarkFxConfig(config, [batch])"
        )
    return [dict(model.dummy_inputs)]


# As decorators they would hide the types of the classes.
register_quantization_config(METHOD)(QuarkFxConfig)
register_quantizer(METHOD)(Quantizer)

__all__ = ["QuarkFxConfig"]
