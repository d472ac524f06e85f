"""Batches for calibration and evaluation, from text, chats, folders of images, and files of arrays."""

from quark_fx.data.arrays import read_arrays
from quark_fx.data.generated import generated_windows
from quark_fx.data.images import LabeledImages, image_folder, labeled_images
from quark_fx.data.sources import read_text
from quark_fx.data.text import chat_windows, text_lines, text_windows

__all__ = [
    "LabeledImages",
    "chat_windows",
    "generated_windows",
    "image_folder",
    "labeled_images",
    "read_arrays",
    "read_text",
    "text_lines",
    "text_windows",
]
