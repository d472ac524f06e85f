"""Batches for calibration and evaluation, from text, folders of images, and files of arrays."""

from quark_fx.data.arrays import read_arrays
from quark_fx.data.generated import generated_windows
from quark_fx.data.images import image_folder, labeled_images
from quark_fx.data.text import text_lines, text_windows

__all__ = ["generated_windows", "image_folder", "labeled_images", "read_arrays", "text_lines", "text_windows"]
