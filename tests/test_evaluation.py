"""Figures are those of their formulas, and the same for every form of a model."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from tiny import Mlp, cnn, images, quantize, rand, seeded, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import quark_fx as qfx
from quark_fx.data.context import context_length
from quark_fx.evaluation import Classification, Embedding, LanguageModeling, compare


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50)).eval()


def windows(count: int = 6, length: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (count, length), generator=generator)
    return [{"input_ids": part} for part in ids.split(4)]


def test_perplexity_and_divergence_are_those_of_the_formula_token_by_token() -> None:
    model, other = language_model(), seeded(language_model(), 1)
    loss, divergence, count = 0.0, 0.0, 0
    for batch in windows():
        with torch.no_grad():
            p, q = (m(**batch).logits.double().softmax(-1) for m in (other, model))
        for row in range(len(p)):
            for place in range(11):
                loss -= math.log(q[row, place, batch["input_ids"][row, place + 1]])
                divergence += float((p[row, place] * (p[row, place] / q[row, place]).log()).sum())
                count += 1
    figures = qfx.evaluate(model, LanguageModeling(windows(), reference=other))
    assert figures["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert figures["KL"] == pytest.approx(divergence / count, rel=1e-4)


def test_padding_is_not_predicted() -> None:
    model = language_model()
    (batch,) = windows(2)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 6:] = 0
    alone = [{"input_ids": batch["input_ids"][:1]}, {"input_ids": batch["input_ids"][1:, :6]}]
    padded = [{"input_ids": batch["input_ids"], "attention_mask": mask}]
    expected = qfx.evaluate(model, LanguageModeling(alone))["perplexity"]
    assert qfx.evaluate(model, LanguageModeling(padded))["perplexity"] == pytest.approx(expected, rel=1e-6)


def test_padding_on_the_left_predicts_nothing() -> None:
    """A model that is sure of every token but the first has perplexity 1, whatever it makes of padding."""
    ids = torch.tensor([[7, 7, 3, 4, 5, 6]])
    logits = torch.full((1, 6, 7), -50.0)
    logits[0, torch.arange(1, 5), ids[0, 2:]] = 50.0
    logits[0, 1] = -50.0
    logits[0, torch.arange(2, 5), ids[0, 3:]] = 50.0
    logits[0, 0] = math.nan
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    task = LanguageModeling([batch], reference=lambda **_: logits)
    assert qfx.evaluate(lambda **_: logits, task) == {"perplexity": pytest.approx(1), "KL": pytest.approx(0)}


def test_labels_of_minus_100_do_not_count() -> None:
    model = language_model()
    (batch,) = windows(2)
    labels = batch["input_ids"].clone()
    labels[:, :7], labels[1, 9:] = -100, 3
    labeled = {**batch, "labels": labels}
    with torch.no_grad():
        own = model(**labeled).loss
    found = qfx.evaluate(model, LanguageModeling([labeled], reference=model))
    assert found == {"perplexity": pytest.approx(math.exp(own), rel=1e-5), "KL": 0}
    assert qfx.evaluate(model, LanguageModeling([batch]))["perplexity"] != pytest.approx(math.exp(own), rel=1e-3)
    qmodel = quantize(model, "w4a16_rtn", [batch])
    task = LanguageModeling([labeled])
    assert qfx.evaluate(qmodel, task) == qfx.evaluate(lambda input_ids: qmodel(input_ids=input_ids), task)
    ids, logits = torch.tensor([[3, -100, 1]]), torch.tensor([[[0, 1.0], [0, 2.0], [3.0, 0]]])
    tokens_ = Classification([(logits, ids.clamp(max=1))], reference=lambda x: x)
    assert qfx.evaluate(lambda x: x, tokens_) == {"accuracy": 0.5, "agreement": 1, "KL": 0}
    labeled["labels"] = torch.full_like(labels, -100)
    assert (
        "no tokens to score; pass batches that can be read again, such as a list, with labels other than -100"
        in words_for(model, LanguageModeling([labeled]))
    )


def test_the_first_error_counts_where_labels_do_not_help() -> None:
    def model(input_ids: Tensor, **labels: Tensor) -> Tensor:
        raise qfx.QuarkError("labels are no help" if labels else "the model is broken")

    def needs(input_ids: Tensor, **labels: Tensor) -> Tensor:
        if not labels:
            raise qfx.QuarkError("labels are missing")
        return nn.functional.one_hot(labels["labels"], 8).float()

    ids = torch.tensor([[1, 2, 3]])
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(qfx.QuarkError, match="the model is broken") as error:
        qfx.evaluate(model, LanguageModeling([batch]))
    assert "largest token id of the batch is 3" in error.value.__notes__[0]
    assert qfx.evaluate(needs, LanguageModeling([batch]))["perplexity"] > 1


def test_rows_of_padding_alone_have_no_vector() -> None:
    batch = {"x": rand(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}
    found = qfx.evaluate(lambda x, attention_mask: x, Embedding([batch], reference=lambda x, attention_mask: x))
    assert found == {"cosine": pytest.approx(1)}
    batch["attention_mask"][0] = 0
    assert "the task received no samples" in words_for(
        lambda x, attention_mask: x, Embedding([batch], reference=lambda **_: _["x"])
    )


def test_labels_that_are_no_class_numbers_are_refused_with_what_to_pass() -> None:
    logits, numbers = torch.eye(3)[[0, 2]], torch.tensor([0, 2])
    some: Any = (numbers, [0, 2], numbers.numpy(), numbers.float())
    same = [Classification([(logits, labels)]) for labels in some]
    assert [qfx.evaluate(lambda x: x, task)["accuracy"] for task in same] == [1] * 4
    for labels, words in (
        (["cat", "ant"], "map class names to the numbers that the model was trained with"),
        (logits.long(), r"labels have the shape of the logits, (2, 3), as one-hot labels do; pass labels.argmax(-1)"),
        (logits.bool(), "as one-hot labels do"),
        (logits / 2, "if they are probabilities, pass labels.argmax(-1)"),
    ):
        assert words in words_for(lambda x: x, Classification([(logits, labels)]))  # type: ignore[list-item]
    binary = torch.tensor([0, 1])
    for one in (torch.tensor([[-1.0], [1.0]]), torch.tensor([-1.0, 1.0])):
        assert "returns one logit per sample" in words_for(lambda x: x, Classification([(one, binary)]))

        def wrapped(logits: Tensor) -> Tensor:
            y = logits.flatten()
            return torch.stack((torch.zeros_like(y), y), -1)

        assert qfx.evaluate(wrapped, Classification([(one, binary)])) == {"accuracy": 1}
    wide = Classification([(logits, numbers)], reference=lambda x: F.pad(x, (0, 1)))
    assert "the model predicts 3 classes, but the reference predicts 4" in words_for(lambda x: x, wide)
    text = {"input_ids": torch.tensor([[1, 2]])}
    other = LanguageModeling([text], reference=lambda input_ids: torch.zeros(1, 2, 7))
    assert "the model predicts 5 classes, but the reference predicts 7" in words_for(
        lambda input_ids: torch.zeros(1, 2, 5), other
    )
    short = LanguageModeling([text | {"labels": torch.tensor([[2]])}])
    assert "the labels are Tensor (1, 1), but the tokens have shape (1, 2)" in words_for(language_model(), short)
    wrong = LanguageModeling([text | {"labels": torch.tensor([[1, -1]])}])
    assert "the tokens or labels contain token -1, but the model predicts 50" in words_for(language_model(), wrong)
    strange = LanguageModeling([{"input_ids": torch.tensor([[1, 60]])}])
    qmodel = quantize(language_model(), "w4a16_rtn", windows())
    with pytest.raises(qfx.QuarkError, match="does not run on a batch: index out of range") as caught:
        qfx.evaluate(qmodel, strange)
    assert "The largest token id of the batch is 60" in str(caught.value.__notes__)


def test_what_cannot_be_judged_is_refused() -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(qfx.QuarkError, match=r"returns logits of shape \(1, 7\) for rows of 4 tokens"):
        qfx.evaluate(lambda **_: torch.zeros(1, 7), LanguageModeling([{"input_ids": ids}]))
    with pytest.raises(qfx.QuarkError, match="labels run from -100 to 2, but the model has 3 classes"):
        qfx.evaluate(lambda x: x, Classification([(torch.eye(3), torch.tensor([0, -100, 2]))]))
    with pytest.raises(qfx.QuarkError, match=r"returns a tensor of shape \(4,\), not one vector per sample"):
        qfx.evaluate(lambda x: x.sum(1), Embedding([torch.ones(4, 3)], reference=lambda x: x.sum(1)))


def test_a_class_that_both_models_exclude_does_not_count() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    task = Classification([(logits, torch.tensor([1]))], reference=lambda x: x)
    assert qfx.evaluate(lambda x: x, task)["KL"] == 0


def test_broken_models_are_far_away() -> None:
    x = torch.ones(2, 3)
    (found,) = compare(lambda x: x, lambda x: x * math.nan, [x])
    assert math.isnan(found.max_abs)
    (found,) = compare(lambda x: x > 0, lambda x: x > 0, [x])
    assert (found.max_abs, found.agreement) == (0, 1)
    (found,) = compare(lambda x: x * 0, lambda x: x * 100, [x])
    assert (found.sqnr, found.cosine) == (-math.inf, 0.0)


def test_all_forms_of_a_language_model_have_the_same_figures(tmp_path: Path) -> None:
    model = language_model()
    qmodel = quantize(model, "w4a16_rtn", windows())
    qmodel.save(tmp_path / "saved")
    model.save_pretrained(tmp_path / "float")
    qfx.export.onnx(qmodel, tmp_path / "a.onnx")
    task = LanguageModeling(windows(), reference=tmp_path / "float")
    assert qfx.evaluate(model, task)["KL"] == 0
    forms = [qmodel, qmodel.eager(), tmp_path / "saved", tmp_path / "a.onnx", lambda **batch: qmodel(**batch)]
    first, *others = (qfx.evaluate(form, task) for form in forms)
    assert first["KL"] > 1e-6
    for figures in others:
        assert figures == pytest.approx(first, rel=1e-3)


def test_a_gguf_file_has_the_figures_of_the_model_it_was_made_of(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = language_model()
    exact = qfx.presets.W4A16_RTN.replace(weight=qfx.gguf_types.Q4_0, target=qfx.Target.TORCH)
    qmodel = quantize(model, exact, windows())
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    task = LanguageModeling(windows(), reference=model)
    expected = qfx.evaluate(qmodel, task)
    assert expected["KL"] > 1e-6
    assert qfx.evaluate(path, task) == pytest.approx(expected, rel=1e-3)
    path.write_bytes((whole := path.read_bytes()).replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"))
    with pytest.raises(qfx.QuarkError, match=r"model\.gguf lacks weights for .*q_proj.weight of the LlamaForCausalLM"):
        qfx.evaluate(path, task)
    path.write_bytes(whole[:100])
    with pytest.raises(qfx.QuarkError, match=r"model\.gguf cannot be read as a GGUF file: .*; copy or export it again"):
        qfx.evaluate(path, task)
    writer = gguf.GGUFWriter(path, "nobody")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        qfx.QuarkError, match=r"transformers does not load .*model\.gguf: (?s:.*)runner_of\(path, 'llama\.cpp'\)"
    ):
        qfx.evaluate(path, task)


def test_accuracy_agreement_and_divergence_of_a_classifier() -> None:
    left = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    right = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    pairs = [(torch.arange(3), torch.tensor([0, 1, 1])), (torch.arange(3, 4), torch.tensor([0]))]
    figures = qfx.evaluate(lambda i: left[i], Classification(pairs, reference=lambda i: {"logits": right[i]}))
    p, q = right.double().softmax(1), left.double().softmax(1)
    assert figures["accuracy"] == 3 / 4
    assert figures["agreement"] == 2 / 4
    assert figures["KL"] == pytest.approx(float((p * (p / q).log()).sum() / 4), rel=1e-6)


def test_vectors_of_tokens_are_averaged_without_padding_before_their_cosine() -> None:
    values, other = rand(2, 3, 4), rand(2, 3, 4, seed=2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    left, right = (torch.stack([v[0].mean(0), v[1, 0]]) for v in (values, other))
    expected = torch.cosine_similarity(left, right).mean()
    task = Embedding([{"x": values, "attention_mask": mask}], reference=lambda x, attention_mask: other)
    assert qfx.evaluate(lambda x, attention_mask: (x,), task)["cosine"] == pytest.approx(float(expected), rel=1e-6)


def test_a_task_of_ones_own_gets_what_runs_a_batch() -> None:
    assert qfx.evaluate(cnn(), lambda run: {"outputs": run(images(4)[0]).numel()}) == {"outputs": 20}


def test_distances_of_two_models_are_those_of_the_formulas(tmp_path: Path) -> None:
    model = cnn()
    qmodel = quantize(model, "int8_static", images())
    qfx.export.onnx(qmodel, tmp_path / "a.onnx")
    (distance,) = compare(model, qmodel, images())
    with torch.no_grad():
        a, b = (torch.cat([m(x) for x in images()]).double() for m in (model, qmodel))
    assert distance.max_abs == pytest.approx(float((a - b).abs().max()))
    assert distance.sqnr == pytest.approx(float(10 * (a.square().sum() / (a - b).square().sum()).log10()), rel=1e-5)
    assert distance.cosine == pytest.approx(float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)))
    assert distance.agreement == float((a.argmax(1) == b.argmax(1)).double().mean())
    (same,) = compare(model, model, images())
    assert (same.sqnr, same.agreement) == (math.inf, 1)
    (exported,) = compare(qmodel, tmp_path / "a.onnx", images())
    assert exported.sqnr > distance.sqnr
    with pytest.raises(qfx.QuarkError, match="no batch to compare the models on"):
        compare(model, qmodel, [])


def test_outputs_are_matched_by_name_and_else_by_position() -> None:
    one, two = lambda x: {"a": x, "past.0": x + 1}, lambda x: {"past_0": x, "a": x}
    found = {d.name: d.max_abs for d in compare(one, two, [rand(3)])}
    assert found == pytest.approx({"a": 0, "past_0": 1}, abs=1e-6)
    assert [d.name for d in compare(lambda x: (x, x), lambda x: {"c": x, "d": x}, [rand(3)])] == ["c", "d"]
    with pytest.raises(
        qfx.QuarkError, match="the models have no output name in common: the first has a, past_0, the second has c"
    ):
        compare(one, lambda x: {"c": x}, [rand(3)])
    with pytest.raises(qfx.QuarkError, match=r"output 'a' has shape \(3,\) in one model and \(1,\) in the other"):
        compare(lambda x: {"a": x}, lambda x: {"a": x[:1]}, [rand(3)])


def test_a_quantized_checkpoint_is_read_from_its_directory_alone(tmp_path: Path) -> None:
    model = language_model()
    model.save_pretrained(tmp_path / "outside")
    qfx.export.huggingface(quantize(model, "int8_weight_only", windows()), tmp_path / "ct")
    (tmp_path / "ct" / "adapter_config.json").write_text('{"base_model_name_or_path": "../outside"}')
    task = LanguageModeling(windows(), reference=tmp_path / "outside")
    assert 0 < qfx.evaluate(tmp_path / "ct", task)["KL"] < 1e-3
    file = tmp_path / "ct" / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), "../outside/model.safetensors")}
    (tmp_path / "ct" / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    assert "which is not a safetensors file next to it" in words_for(tmp_path / "ct", task)


def words_for(model: Any, task: Any) -> str:
    with pytest.raises(qfx.QuarkError) as error:
        qfx.evaluate(model, task)
    return str(error.value)


def test_what_cannot_be_judged_is_refused_by_name(tmp_path: Path) -> None:
    pairs = [(images(4)[0], torch.zeros(4, dtype=torch.int64))]
    file = qfx.export.onnx(quantize(cnn(), "int8_static", images()), tmp_path / "a.onnx")
    task = Classification(pairs)
    assert "Sequential is in training mode" in words_for(nn.Sequential(nn.Linear(2, 2)), task)
    assert "not int" in words_for(3, task)
    assert "gone does not exist" in words_for(tmp_path / "gone", task)
    assert "is not a model that can be run; pass an .onnx or .gguf file" in words_for(tmp_path, task)
    assert "returns str, not tensors" in words_for(lambda x: "yes", task)
    assert "one row of logits for each label" in words_for(lambda x: x, task)
    assert "a task must be LanguageModeling" in words_for(cnn(), "accuracy")
    assert "Classification takes pairs of inputs and labels" in words_for(cnn(), Classification(images(4)))  # type: ignore[arg-type]
    lacking = images(4)[0] * math.nan
    for broken in (Classification([(lacking, pairs[0][1])]), Embedding([lacking], reference=cnn())):
        assert "an evaluation batch: input 0 holds NaN" in words_for(file, broken)
    assert "the model returns NaN; check its inputs" in words_for(lambda x: x.flatten(1) * math.nan, task)
    vectors = Embedding([rand(2, 3)], reference=lambda x: x)
    assert "the model returns NaN; check its inputs" in words_for(lambda x: x * math.nan, vectors)
    assert "the task received no samples" in words_for(cnn(), Classification([]))
    assert "Cnn does not run on a batch: " in words_for(cnn(), Classification([(rand(1, 2, 8, 8), torch.zeros(1))]))
    assert "language modeling takes batches" in words_for(cnn(), LanguageModeling([{"ids": torch.ones(2, 3)}]))
    assert "language modeling takes batches" in words_for(cnn(), LanguageModeling([{"input_ids": torch.ones(2, 3)}]))
    strange = LanguageModeling([{"input_ids": torch.tensor([[1, 60]])}])
    assert "the tokens or labels contain token 60, but the model predicts 50" in words_for(
        lambda input_ids: language_model()(input_ids % 50), strange
    )
    assert "LlamaForCausalLM does not run on a batch: index out of range" in words_for(language_model(), strange)
    assert "a.onnx has the inputs x, but the batch has mask" in words_for(
        file, Embedding([{"mask": rand(2)}], reference=cnn())
    )
    assert "the batch has 2 by position" in words_for(file, Embedding([(rand(2), rand(2))], reference=cnn()))
    assert "ONNX Runtime does not run" in words_for(file, Embedding([rand(2, 3, 8, 8).double()], reference=cnn()))


class Words:
    """A tokenizer of numbers in a text."""

    eos_token_id = 9

    def __call__(self, text: Any, verbose: bool = True, **_: Any) -> dict[str, Any]:
        return {"input_ids": [int(word) for word in text.split()]}


def test_windows_are_packed_and_spread_over_the_text() -> None:
    text = " ".join(map(str, range(23)))
    batches = qfx.data.text_windows(text, Words(), length=4, batch_size=3)
    assert [b["input_ids"].tolist() for b in batches] == [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        [[12, 13, 14, 15], [16, 17, 18, 19]],
    ]
    (spread,) = qfx.data.text_windows(text, Words(), length=4, count=2)
    assert spread["input_ids"][:, 0].tolist() == [0, 8]
    (documents,) = qfx.data.text_windows(["1 2", "3"], Words(), length=5)
    assert documents["input_ids"].tolist() == [[1, 2, 9, 3, 9]]
    with pytest.raises(qfx.CalibrationError, match="the text has 2 tokens, fewer than a window of 5"):
        qfx.data.text_windows("1 2", Words(), length=5)


def test_a_tokenizer_prints_no_warning_about_the_length_of_a_text() -> None:
    given = list[bool]()

    class Verbose(Words):
        def __call__(self, text: Any, verbose: bool = True, **_: Any) -> dict[str, Any]:
            given.append(verbose)
            return super().__call__(text)

    qfx.data.text_windows("1 2 3", Verbose(), length=2)
    assert given == [False]


TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A word a token, in the order of `words`."""
    words = ["?", "user", "assistant", "a", "b", "c"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=plain)
    made.chat_template = template
    return made


def test_conversations_are_packed_in_the_tokenizers_template() -> None:
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    (windows,) = qfx.data.chat_windows([first, [{"role": "user", "content": "c"}]], chat_tokenizer(), length=3)
    assert windows["input_ids"].tolist() == [[1, 3, 2], [4, 5, 1]]  # the last token fills no window
    with pytest.raises(qfx.CalibrationError, match=r"lacks a chat template; set its chat_template"):
        qfx.data.chat_windows([first], chat_tokenizer(None), length=3)
    refusing = chat_tokenizer("{{ raise_exception('roles have to alternate') }}")
    with pytest.raises(qfx.CalibrationError, match=r"rejects conversation 0: roles have to alternate"):
        qfx.data.chat_windows([first], refusing, length=3)


def test_text_is_read_by_the_name_of_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "texts_of_a_test"
    (package / "folder").mkdir(parents=True)
    (package / "__init__.py").write_text("ONE, SEVERAL, NUMBER = 'a b', {1: 'a', 2: 'b'}, 3")
    (package / "folder" / "text.txt").write_text("c")
    (tmp_path / "outside.txt").write_text("no text of the package")
    (tmp_path / "breaks_when_imported.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    assert qfx.data.read_text("texts_of_a_test:folder/text.txt") == "c"
    assert "texts_of_a_test" not in sys.modules  # a file is read without running the package
    assert qfx.data.read_text("texts_of_a_test:ONE") == "a b"
    assert qfx.data.read_text("texts_of_a_test:SEVERAL") == ["a", "b"]
    sys.modules.pop("texts_of_a_test")
    for name, message in {
        "texts_of_a_test:../outside.txt": "neither a file",
        "texts_of_a_test:NUMBER": "neither a file NUMBER nor a text",
        "not_installed_here:text": "package not_installed_here is not installed",
        "__main__:text": "neither a file|is not installed",
        "breaks_when_imported:text": "importing breaks_when_imported raised SystemExit: 3",
        "gone.txt": "gone.txt cannot be read as text",
    }.items():
        with pytest.raises(qfx.CalibrationError, match=message):
            qfx.data.read_text(name)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"text": "a"}', "", '"b"'], ["a", "b"]),
        (['{"messages": [{"role": "user", "content": "a"}]}'], [[{"role": "user", "content": "a"}]]),
        (
            ['{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'],
            [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]],
        ),
        (['{"text": "a\u2028b"}'], ["a\u2028b"]),
        (["{"], "line 1 of .* is not valid JSON"),
        (['"a"', '{"answer": 1}'], "line 2 of .* must have `text`, or `messages`"),
        (['"a"', '{"messages": [{"role": "user", "content": "a"}]}'], "texts and conversations"),
        ([""], "is empty; write one JSON object per line"),
    ],
    ids=["texts", "messages", "ShareGPT", "separator", "no JSON", "neither", "both", "nothing"],
)
def test_lines_of_json_are_texts_or_conversations(lines: list[str], expected: object, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(lines))
    if isinstance(expected, str):
        with pytest.raises(qfx.CalibrationError, match=expected):
            qfx.data.read_text(file)
    else:
        assert qfx.data.read_text(file) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "\ufeffa\nb", "a\nb"),
        ("a.md", "[a](b) c", "[a](b) c"),
        ("a.txt", "{a}\nb", "{a}\nb"),
        ("a.jsonl", '\ufeff{"text": "a"}', ["a"]),
        ("a.json", '[{"text": "a"}, "b"]', ["a", "b"]),
        ("a.json", '{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("a.txt", '{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("a.json", '[{"messages": [{"role": "user", "content": "a"}]}]', [[{"role": "user", "content": "a"}]]),
        (
            "config.json",
            '{"hidden_size": 8}',
            qfx.CalibrationError(r"sample 1 of .* must have `text`, or `messages`"),
        ),
        ("config", '{\n "hidden_size": 8\n}', qfx.CalibrationError(r"sample 1 of .* must have `text`")),
        ("a.json", "[1", qfx.CalibrationError(r"line 1 of .* is not valid JSON")),
        ("a.csv", '\ufefftext,label\n"a, b",1\nc,2\n', ["a, b", "c"]),
        ("a.tsv", "label\ttext\n1\ta\n", ["a"]),
        ("a.csv", "x,y\n1,2\n", qfx.CalibrationError(r"table without a column `text` \(its columns: x, y\)")),
        ("a.csv", 'text\n"a', qfx.CalibrationError(r"line \d of .* is not valid CSV")),
        ("a.bin", "a\0b", qfx.CalibrationError("zero bytes")),
        ("a.txt", None, qfx.CalibrationError("cannot be read as text: a.txt is not a regular file")),
    ],
)
def test_a_file_is_text_only_if_it_is_no_data(name: str, content: str | None, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content.encode())
    if isinstance(expected, qfx.CalibrationError):
        with pytest.raises(qfx.CalibrationError, match=str(expected)):
            qfx.data.read_text(file)
    else:
        assert qfx.data.read_text(file) == expected


def test_one_text_is_split_into_its_lines_and_one_conversation_is_refused() -> None:
    padding = chat_tokenizer()
    padding.pad_token = "?"
    whole, parts = (qfx.data.text_lines(lines, padding) for lines in ("a b\n\nc\n", ["a b", "", "c"]))
    assert whole[0]["input_ids"].tolist() == parts[0]["input_ids"].tolist() == [[3, 4], [5, 0]]
    for wrong in ([{"role": "user", "content": "a"}], "a b"):
        with pytest.raises(qfx.CalibrationError, match=r"item 0 is a (message|string); wrap the messages"):
            qfx.data.chat_windows(wrong, padding, length=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (b"a b", r"not a bytes; decode it"),
        ({"text": "a b"}, "not a dict; pass its values"),
        (["a b", None], "item 1 is None, a NoneType; pass a list of strings"),
        ([{"text": "a b"}], r"item 0 is \{'text': 'a b'\}, a dict; .*row\['text'\] for row"),
        ([Path("a.txt")], r"a PosixPath; .*read_text\(path\)"),
    ],
)
def test_values_that_are_no_texts_are_refused_with_a_remedy(texts: Any, words: str) -> None:
    for read in (qfx.data.text_lines, qfx.data.text_windows):
        with pytest.raises(qfx.CalibrationError, match=words):
            read(texts, chat_tokenizer(), length=1)


def test_a_model_writes_its_own_calibration_data() -> None:
    model = language_model()
    before = torch.get_rng_state()
    first, second = qfx.data.generated_windows(model, length=16, count=3, batch_size=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [batch["input_ids"].shape for batch in (first, second)] == [(2, 16), (1, 16)]
    rows = torch.cat([first["input_ids"], second["input_ids"]])
    assert (rows[:, 0] == model.config.bos_token_id).all()
    with torch.no_grad():
        likeliest = model(rows).logits.argmax(-1)
    assert torch.equal(rows[:, 2:6], likeliest[:, 1:5])  # four are greedy
    assert not torch.equal(rows[:, 6:], likeliest[:, 5:-1])  # and then none has to be
    (again,) = qfx.data.generated_windows(model, length=16, count=3)
    assert torch.equal(again["input_ids"][:, :2], rows[:, :2])
    (other,) = qfx.data.generated_windows(model, length=16, count=3, seed=1)
    assert not torch.equal(other["input_ids"], again["input_ids"])
    assert isinstance(qfx.quantize(model, "w4a16_gptq", [first, second], progress=False), qfx.QuantizedModel)
    model.generation_config.update(min_p=0.999, suppress_tokens=[*range(10, 50)], return_dict_in_generate=True)
    settings = model.generation_config.to_dict()
    (plain,) = qfx.data.generated_windows(model, length=16, count=3)
    assert torch.equal(plain["input_ids"], again["input_ids"])
    assert model.generation_config.to_dict() == settings
    with pytest.raises(qfx.CalibrationError, match="Linear cannot generate text"):
        qfx.data.generated_windows(nn.Linear(2, 2))
    with pytest.raises(qfx.CalibrationError, match="length=6 is too short; generate at least 7 tokens"):
        qfx.data.generated_windows(model, length=6)
    with pytest.raises(qfx.CalibrationError, match="in training mode, first the model itself"):
        qfx.data.generated_windows(language_model().train())
    with pytest.raises(qfx.CalibrationError, match="length=4096 exceeds the 2048 positions"):
        qfx.data.generated_windows(model, length=4096)
    broken = language_model()
    nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(qfx.CalibrationError, match="method of LlamaForCausalLM failed: "):
        qfx.data.generated_windows(broken, length=16, count=1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=48), 48),
        (GPT2Config(n_positions=32), 32),
        ({"n_positions": 32}, 32),
        ({"text_config": {"max_position_embeddings": 24}, "max_position_embeddings": 8}, 24),
        ({"max_position_embeddings": None}, None),
    ],
    ids=["object", "other name", "JSON", "part for text", "silent"],
)
def test_a_configuration_says_how_many_tokens_are_read(config: Any, expected: int | None) -> None:
    assert context_length(config) == expected


def test_images_are_scaled_cut_and_normalized(tmp_path: Path) -> None:
    pixels = np.zeros((4, 8, 3), dtype=np.uint8)
    pixels[:, 2:6] = (255, 51, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (batch,) = qfx.data.image_folder(tmp_path, size=4, mean=(0.5, 0, 0), std=(0.5, 1, 2))
    expected = torch.tensor([1, 0.2, 0])[:, None, None].expand(3, 4, 4)
    torch.testing.assert_close(batch, expected[None])  # the columns that were cut out, in full color
    (gray,) = qfx.data.image_folder(tmp_path, mean=(0,), std=(1,))
    assert gray.shape == (1, 1, 4, 8)
    with pytest.raises(qfx.CalibrationError, match="mean has 2 numbers and std 2"):
        qfx.data.image_folder(tmp_path, mean=(0, 1), std=(1, 1))


def test_labels_are_the_numbers_of_folders_or_their_order(tmp_path: Path) -> None:
    for root, names in (("a", ("10", "9", "2")), ("b", ("cat", "ant", "dog"))):
        for name in names:
            (tmp_path / root / name).mkdir(parents=True)
            Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8)).save(tmp_path / root / name / "x.png")
    for root, labels in (("a", [10, 2, 9]), ("b", [0, 1, 2])):
        pairs = qfx.data.labeled_images(tmp_path / root, batch_size=2, mean=(0,), std=(1,))
        assert torch.cat([label for _, label in pairs]).tolist() == labels
        assert [len(batch) for batch, _ in pairs] == [2, 1]
    Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8)).save(tmp_path / "b" / "x.png")
    with pytest.raises(qfx.ConfigError, match="image_folder has no argument means"):
        qfx.data.labeled_images(tmp_path / "a", means=(0,))
    with pytest.raises(qfx.CalibrationError, match=r"x\.png is not in a subfolder for a class"):
        qfx.data.labeled_images(tmp_path / "b")


def test_hidden_and_empty_folders_are_no_classes(tmp_path: Path) -> None:
    pixels = Image.fromarray(np.zeros((2, 2, 3), dtype=np.uint8))
    for name in ("ant", "bee", ".ipynb_checkpoints", "cat/.thumbnails", "notes", "elsewhere/dog"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("ant/x", "ant/._x", "cat/x", "cat/.thumbnails/x", ".ipynb_checkpoints/x", "elsewhere/dog/x"):
        pixels.save(tmp_path / f"{name}.png")
    (tmp_path / "notes" / "a.txt").touch()
    (tmp_path / "elsewhere").rename(tmp_path.with_name("elsewhere"))
    (tmp_path / "dog").symlink_to(tmp_path.with_name("elsewhere") / "dog")
    with pytest.warns(UserWarning, match=r"bee, notes in .* contain no images and are skipped as classes"):
        pairs = qfx.data.labeled_images(tmp_path)
    assert pairs.class_to_idx == {"ant": 0, "cat": 1, "dog": 2}
    ((batch, labels),) = pairs
    assert (len(batch), labels.tolist()) == (3, [0, 1, 2])
    assert len(qfx.data.image_folder(tmp_path)[0]) == 3
    (tmp_path / "ant" / "again").symlink_to(tmp_path)
    assert len(qfx.data.image_folder(tmp_path)[0]) == 3
    (tmp_path / "ant" / "again").unlink()
    numbers = tmp_path / "numbers"
    for name in ("7", "11", ".cache"):
        (numbers / name).mkdir(parents=True)
        pixels.save(numbers / name / "x.png")
    assert qfx.data.labeled_images(numbers).class_to_idx == {"7": 7, "11": 11}
    (numbers / "07").mkdir()
    pixels.save(numbers / "07" / "x.png")
    assert qfx.data.labeled_images(numbers).class_to_idx == {"07": 0, "11": 1, "7": 2}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int, tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    image, exif = Image.fromarray(values), Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    (batch,) = qfx.data.image_folder(tmp_path, mean=(0, 0, 0), std=(1, 1, 1))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))
    assert upright.shape == ((2, 4, 3) if orientation < 5 else (4, 2, 3))
    torch.testing.assert_close(batch[0], torch.from_numpy(upright.copy()).permute(2, 0, 1) / 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_are_refused_and_opaque_ones_read(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 2), (60, 60, 60, 255))
    plain: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    for alpha in (255, 128):
        image.putpixel((0, 1), (60, 60, 60, alpha))
        options: dict[str, Any] = {}
        if mode == "RGB" and alpha < 255:  # one color that stands for transparency
            options["transparency"] = (60, 60, 60)
        elif mode == "P":
            options["transparency"] = bytes([alpha])
        image.convert(mode).save(tmp_path / "a.png", **options)
        if alpha == 255:
            assert qfx.data.image_folder(tmp_path, **plain)[0].unique().tolist() == pytest.approx([60 / 255])
    with pytest.raises(qfx.CalibrationError, match=r"a\.png has transparent pixels.*or pass prepare="):
        qfx.data.image_folder(tmp_path)
    flat = qfx.data.image_folder(tmp_path, prepare=lambda found: [image.convert("RGB").size for image in found])
    assert flat == [[(2, 2)]]


def test_images_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4) * 1000).save(tmp_path / "x.png")
    with pytest.raises(qfx.CalibrationError, match=r"x\.png has more than 8 bits per value"):
        qfx.data.image_folder(tmp_path)


def test_arrays_are_read_in_batches_and_doubles_become_floats(tmp_path: Path) -> None:
    values = rand(5, 2)
    np.save(tmp_path / "x.npy", values.double().numpy())
    first, second = qfx.data.read_arrays(tmp_path / "x.npy", batch_size=3)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert first.dtype == torch.float32
    torch.testing.assert_close(torch.cat([first, second]), values, rtol=0, atol=0)
    save_file({"ids": torch.arange(4), "x": rand(4, 2)}, tmp_path / "both.safetensors")
    (batch,) = qfx.data.read_arrays(tmp_path / "both.safetensors", count=2)
    assert isinstance(batch, dict)
    assert batch["ids"].tolist() == [0, 2]
    np.savez(tmp_path / "odd.npz", a=np.zeros(3), b=np.zeros(2))
    with pytest.raises(qfx.CalibrationError, match=r"differ in their number of samples \(a 3, b 2\)"):
        qfx.data.read_arrays(tmp_path / "odd.npz")
    for name, array in (("number", np.array(3.0)), ("nothing", np.zeros((0, 2)))):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(qfx.CalibrationError, match="holds no samples; the first dimension of each array must"):
            qfx.data.read_arrays(tmp_path / f"{name}.npy")


def test_an_exported_file_of_8_bit_floats_runs_as_the_graph_says(tmp_path: Path) -> None:
    """Fused, ONNX Runtime's kernels have no 8-bit floats."""
    qmodel = quantize(seeded(Mlp()), "fp8_static", tokens())
    qfx.export.onnx(qmodel, tmp_path / "a.onnx")
    (distance,) = compare(qmodel, tmp_path / "a.onnx", tokens())
    assert distance.sqnr > 60


@pytest.mark.parametrize("batches", [5, torch.zeros(2, 3), {"x": torch.zeros(2, 3)}], ids=["5", "tensor", "mapping"])
def test_a_single_batch_is_not_an_iterable_of_batches(batches: Any) -> None:
    kind = type(batches).__name__
    words = rf"must be an iterable of batches, not a single {kind}; wrap a single batch in a list"
    with pytest.raises(qfx.QuarkError, match=f"^batches {words}"):
        compare(torch.relu, torch.relu, batches)
    for task in (Classification, LanguageModeling, partial(Embedding, reference=torch.relu)):
        with pytest.raises(qfx.QuarkError, match=f"^batches of .* {words}"):
            task(batches)


def test_empty_batches_are_not_compared() -> None:
    with pytest.raises(qfx.QuarkError, match=r"batch 1: the outputs are empty; pass batches with values"):
        compare(torch.relu, torch.relu, [torch.ones(2, 3), torch.ones(0, 3)])
