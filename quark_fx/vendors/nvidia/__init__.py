"""NVIDIA's TensorRT: the target `tensorrt`, which checks files against its documentation."""

from quark_fx.vendors.nvidia import tensorrt as tensorrt
