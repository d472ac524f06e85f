"""How long capture takes for language models that `torch.export` traces slowly, and whether other sizes are right.

    python -m benchmarks.captured_shapes [NAME …] [--write]

Four architectures of transformers, small, with seeded weights, each captured on 2 sequences of 32 tokens in a process
of its own, on one thread. *Export* is the share of `torch.export` in the CPU seconds. The captured graph is then called
with other batches and lengths: *apart* is the largest difference from the model over the largest logit, *refused* lists
the sizes that the signature names an error for. `--write` updates `docs/captured_shapes.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
import transformers as tf
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import apart_from_others, environment, publish, table
from quark_fx.errors import QuarkError

SIZES = ((2, 32), (3, 32), (1, 32), (2, 48), (2, 30), (2, 17), (1, 5), (2, 64), (2, 100))
"""(batch, tokens) of the calls, the captured one first."""


MODELS: dict[str, Callable[[], nn.Module]] = {
    # A mixture of 64 experts in groups, with latent attention.
    "DeepSeek-V3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=32,
            num_hidden_layers=4,
            first_k_dense_replace=1,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=64,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=32,
            v_head_dim=32,
        )
    ),
    # A decoder with embeddings per layer, sliding windows and sparse activations.
    "Gemma 3n": lambda: tf.Gemma3nForCausalLM(
        tf.Gemma3nTextConfig(
            vocab_size=512,
            vocab_size_per_layer_input=512,
            hidden_size=128,
            intermediate_size=256,
            hidden_size_per_layer_input=32,
            num_hidden_layers=5,
            num_attention_heads=8,
            head_dim=32,
            num_key_value_heads=2,
            num_kv_shared_layers=0,
            laurel_rank=16,
            sliding_window=32,
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0],
        )
    ),
    # State-space layers that work on chunks of 16 tokens.
    "Mamba2": lambda: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(
            vocab_size=512,
            hidden_size=128,
            num_heads=32,
            head_dim=8,
            state_size=32,
            n_groups=8,
            num_hidden_layers=4,
            chunk_size=16,
        )
    ),
    # A mixture of 64 experts with gated delta rules and attention in turns.
    "Qwen3-Next": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=32,
            moe_intermediate_size=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            shared_expert_intermediate_size=32,
            num_experts=64,
            num_experts_per_tok=10,
        )
    ),
}


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    """Return seeded token ids, another seed for every size."""
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return {"input_ids": torch.randint(2, 512, (batch, length), generator=generator)}


def _child(name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    first = tokens(*SIZES[0])
    with torch.no_grad():
        model(**first)
    exported = 0.0
    export = torch.export.export

    def timed_export(*args: object, **options: object) -> object:
        nonlocal exported
        began = time.process_time()
        try:
            return export(*args, **options)  # type: ignore[arg-type]
        finally:
            exported += time.process_time() - began

    torch.export.export = timed_export  # type: ignore[assignment]
    began = time.process_time()
    captured = qfx.capture_graph(model, first)
    seconds = time.process_time() - began
    apart, refused = 0.0, []
    for size in SIZES:
        batch = tokens(*size)
        with torch.no_grad():
            want = model(**batch, use_cache=False).logits
        try:
            made = captured.signature.unflatten(captured.module(*captured.signature.flatten((), batch)))
        except QuarkError:
            refused.append(f"{size[0]}×{size[1]}")
            continue
        logits = made["logits"] if isinstance(made, dict) else made.logits
        apart = max(apart, float((logits - want).detach().abs().max() / want.abs().max()))
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps([parameters, len(captured.module.graph.nodes), seconds, exported, apart, ", ".join(refused)]))


def main() -> None:
    """Capture each architecture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--write", action="store_true", help="update docs/captured_shapes.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments.child)
        return
    rows = []
    for name in arguments.names or MODELS:
        parameters, nodes, seconds, exported, apart, refused = apart_from_others(
            "benchmarks.captured_shapes", "--child", name
        )
        sizes = f"{parameters / 1e6:.1f} M", f"{nodes:,}", f"{seconds:.1f}", f"{exported:.1f}", f"{apart:.0e}"
        rows.append((name, *sizes, refused or "none"))
        print(*rows[-1], file=sys.stderr)
    header = ("architecture", "parameters", "nodes", "CPU s to capture", "of which export", "apart", "refused")
    page = f"""# Captured architectures

Written by `python -m benchmarks.captured_shapes --write`, whose docstring says what is measured.

{table(header, rows)}

{environment()}
"""
    publish(page, "captured_shapes.md" if arguments.write else None)


if __name__ == "__main__":
    main()
