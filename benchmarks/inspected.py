"""What `quark-fx inspect` says of files that other tools wrote.

    python -m benchmarks.inspected --llm-compressor llmc/bin/python --gptqmodel gptqm/bin/python [--write]

A Llama of two layers with random weights is quantized by llm-compressor and by GPTQModel, each in a process and an
environment of its own (`benchmarks.peers.checkpoint_writers`), and a CNN by ONNX Runtime's quantizer. `--write` writes
`results/inspected.md`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from benchmarks.experiment import experiment
from quark_fx.command_line.app import app

ROOT = Path(__file__).resolve().parent.parent

SHOWN = ("llm-compressor NVFP4", "llm-compressor FP8-cache", "gptqmodel dynamic", "static.onnx")
"""Files whose whole reports are on the page."""


def write_float(folder: Path) -> None:
    """Write the checkpoint that the tools quantize."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(words, [])), pad_token="a").save_pretrained(folder)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Hands one batch to ONNX Runtime's quantizer."""

    def __init__(self, x: torch.Tensor) -> None:
        self.batches = iter([{"x": x.numpy()}])

    def get_next(self) -> Any:
        """Return it once."""
        return next(self.batches, None)


def write_onnx(folder: Path) -> None:
    """Let ONNX Runtime's quantizer write a CNN in three forms."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    x, source = torch.randn(8, 3, 8, 8), folder / "float.onnx"
    with redirect_stdout(StringIO()):
        torch.onnx.export(network, (x,), source, input_names=["x"], external_data=False)
    quantize_dynamic(source, folder / "dynamic.onnx")
    quantize_static(source, folder / "static.onnx", Reader(x), per_channel=True)
    quantize_static(source, folder / "integers.onnx", Reader(x), quant_format=QuantFormat.QOperator)
    source.unlink()


def reports(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder and what `quark-fx inspect` prints of them."""
    for path in sorted(folder.iterdir()):
        done = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "150"}, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        lines = (line.rstrip() for line in done.output.replace(f"{folder}/", "").splitlines())
        yield path.name, "\n".join(line for line in lines if line)


def page(found: dict[str, str]) -> str:
    """Return the page."""
    kinds = "\n".join(text.partition("\n")[0] for text in found.values())
    whole = "\n\n".join(f"```text\n{found[name]}\n```" for name in SHOWN if name in found)
    return f"""# Files of other tools, inspected

`quark-fx inspect` reads the files of llm-compressor, GPTQModel and ONNX Runtime's quantizer; these are a Llama of two
layers and a CNN, with random weights. The first line of each report:

```text
{kinds}
```

Some of them whole:

{whole}

Reproduce with `python -m benchmarks.inspected --llm-compressor PYTHON --gptqmodel PYTHON`.
"""


@experiment(page="inspected.md")
def main(
    llm_compressor: Annotated[Path | None, "Python of an environment that has llmcompressor"] = None,
    gptqmodel: Annotated[Path | None, "Python of an environment that has gptqmodel"] = None,
) -> str:
    """Measure, and return the page."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_float(folder / "float")
        write_onnx(folder)
        for tool, python in (("llm-compressor", llm_compressor), ("gptqmodel", gptqmodel)):
            if python is not None:
                command = [str(python), "-m", "benchmarks.peers.checkpoint_writers", tool, scratch]
                subprocess.run(command, cwd=scratch, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        found = dict(reports(folder))
    return page(found)


if __name__ == "__main__":
    main()
