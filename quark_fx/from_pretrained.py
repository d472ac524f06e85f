"""`from_pretrained` of transformers, quantizing what it loads.

Not imported by `quark_fx`: it needs transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.resources import IN_RESOURCES, Resources, require_usable
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.quantization import needs_data, quantize, resolve
from quark_fx.system.options import require_names

METHOD = "quark_fx"
"""The name transformers knows this method by."""

_OPTIONS = ("resources", "dynamic_shapes", "verify", "progress")
"""Arguments of `quantize` that are passed on."""

_RESOURCES = ("device", "cache", "checkpoint", "memory")
"""Fields of `Resources` that apply: the model is loaded already, by one process."""


class QuarkFxConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Let `from_pretrained` of transformers quantize what it loads: pass it as `quantization_config`.

    The result is the model's own class, as `QuantizedModel.eager` returns it; `model.hf_quantizer.qmodel` is the
    quantized model, with its report, for `quark_fx.export` and `save`. A `config.json` with the dictionary of one,
    `{"quant_method": "quark_fx", "config": "int8_dynamic"}`, quantizes float weights, too. A checkpoint that is
    quantized already is refused by transformers. A model that does not fit into memory is quantized from its directory
    instead (`open_checkpoint`).

    Args:
        config: a preset's name, a `QuantConfig`, or its `to_dict()`.
        calibration_data: batches, as `quantize` takes them. A configuration that learns nothing from data needs none
            if the model reads tokens.
        kernels: run on the kernels that `compile()` uses, for inference on a CPU; see `QuantizedModel.eager`.
        options: `resources` (`device`, `cache`, `checkpoint`, and `memory`), `dynamic_shapes`, `verify`, and `progress`
            of `quantize`.

    Raises:
        ConfigError: for an unknown preset or option.
        CalibrationError: for a configuration that needs data, without any.
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
        """Return what `to_dict` was called on, without the data."""
        given = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(given, return_unused_kwargs, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return what the configuration of a model shows, as plain data."""
        return {"quant_method": METHOD, "config": self.config.to_dict(), "kernels": self.kernels}

    def __deepcopy__(self, memo: Any) -> QuarkFxConfig:
        return self  # copies of a model share the calibration data


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls once the weights are there.

    Attributes:
        qmodel: the quantized model.
    """

    quantization_config: QuarkFxConfig
    qmodel: QuantizedModel

    def __init__(self, quantization_config: QuarkFxConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs | {"pre_quantized": False})

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse to distribute a model over devices.

        Raises:
            ConfigError: for such a `device_map`.
        """
        if isinstance(device_map, Mapping):  # "auto" and other words are resolved later
            _require_one_device(device_map)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        asked = self.quantization_config
        _require_one_device(getattr(model, "hf_device_map", {}))
        data = _example(model) if asked.calibration_data is None else asked.calibration_data
        self.qmodel = quantize(model, asked.config, data, **asked.options)
        # The caller holds this object: it becomes what `eager` returns.
        vars(model).update(vars(self.qmodel.eager(kernels=asked.kernels)) | {"hf_quantizer": self})
        return model

    def is_serializable(self) -> bool:
        """Tell whether `save_pretrained` writes it: what `eager` returns refuses, and says what does."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether `Trainer` may train it: see `prepare_qat` instead."""
        return False

    def __deepcopy__(self, memo: Any) -> Quantizer:
        return self


def _require_one_device(places: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if modules lie on several devices: transformers then moves tensors between them in hooks."""
    if len({*places.values()}) > 1:
        found = ", ".join(sorted({str(place) for place in places.values()}))
        raise ConfigError(
            f"device_map distributes the model over {found}, and a quantized one lies on one device: load it with "
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
