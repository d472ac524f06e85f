"""The documentation keeps its word: its Python runs, links lead somewhere, names exist, figures are those measured."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from byte_pairs import byte_pairs
from checkpoint_readers import read_checkpoints_here
from transformers import LlamaConfig, LlamaForCausalLM

import quark_fx as qfx
from quark_fx import block_formats, observers, passes
from quark_fx.numbers import qparams
from quark_fx.presets import PRESETS
from quark_fx.solvers.schedule import Schedule
from quark_fx.vendors.amd import passes as dpu_passes
from quark_fx.vendors.amd.passes import align_shifts

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

NAMES: dict[str, Any] = {
    **{
        name: getattr(module, name)
        for module in (qparams, block_formats, dpu_passes, passes, observers, qfx)
        for name in dir(module)
    },
    **PRESETS,
}
"""What a name or the start of a dotted one may be."""

_TAKE_OPTIONS = (
    *(qfx.TensorSpec, qfx.QuantConfig, qfx.quantize, qfx.export.onnx),
    *(getattr(observers, name) for name in observers.__all__ if inspect.isclass(getattr(observers, name))),
    *(
        getattr(room, name)
        for room in (passes, dpu_passes)
        for name in room.__all__
        if inspect.isclass(getattr(room, name))
    ),
)
OPTIONS = {name for one in _TAKE_OPTIONS for name in inspect.signature(one).parameters}
OPTIONS |= {name for name in dir(observers.Observer) if not name.startswith("_")}

THEIRS = {"Cast", "ExtendedQuantFormat.QDQ"}
"""Words in the columns of ours that are an operator of ONNX and a newer name of another tool."""


def spans() -> list[str]:
    """Return what the right columns of the tables quote."""
    found = []
    for document in ("onnx.md", "observers.md", "coming_from.md"):
        text = (DOCS / document).read_text(encoding="utf-8")
        (table,) = re.findall(r"^## Names elsewhere\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        cells = [line.split(" | ", 1)[1] for line in table.splitlines() if line.startswith("| ")]
        found += [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return sorted(set(found) - THEIRS)


def require(span: str) -> None:
    """Require that what a table quotes is here."""
    text = span.replace("…", "...")
    if text.startswith('"'):
        value = ast.literal_eval(text)
        assert value in align_shifts.RULES or value in ("bfloat16", "most_common", "percentile", "tensor")
        return
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:  # options as one would type them, of a call or of an attribute
        owner, _, options = text.rpartition(".") if re.match(r"[A-Z]\w*\.", text) else ("", "", text)
        names = [keyword.arg for keyword in ast.parse(f"f({options})", mode="eval").body.keywords]  # type: ignore[attr-defined]
        known = OPTIONS if not owner else set(inspect.signature(NAMES[owner]).parameters)
        assert names
        assert set(names) <= known
        return
    if isinstance(node, ast.Call):
        made = NAMES[ast.unparse(node.func)]
        assert {keyword.arg for keyword in node.keywords} <= set(inspect.signature(made).parameters)
        given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if ast.unparse(k.value) != "..."}
        if made is qfx.TensorSpec:
            given = {"format": "int8", **given}
        made(**given)
    elif isinstance(node, ast.Attribute):
        owner = NAMES[ast.unparse(node.value)]
        assert hasattr(owner, node.attr) or node.attr in inspect.signature(owner).parameters
    else:
        assert isinstance(node, ast.Name)
        assert node.id in NAMES or node.id in OPTIONS


@pytest.mark.parametrize("span", spans())
def test_a_name_in_the_tables_of_other_tools_is_here(span: str) -> None:
    require(span)


@pytest.mark.parametrize(
    "span", ["Percentil", "Percentile(share=…)", "GPTQ(dampening=…)", "Scheme.sym", "granul=1", '"cutt"']
)
def test_a_name_that_is_not_here_is_found(span: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        require(span)


RUN_ELSEWHERE = {"qat.md": "tests/model/test_qat.py"}
"""Pages of which another test runs the code, and holds it to more."""


def blocks_of(page: Path) -> list[str]:
    """Return the Python of a page; copies of files are imported, as the other tests do.

    Blocks of `{.python}` that are no copies need a package that tests do not install.
    """
    text = page.read_text(encoding="utf-8")
    found = re.findall(rf"^(?:{_COPY}``` \{{\.python\}}|```python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    module = re.compile(r"tests/(.+)\.py")
    return [
        module.sub(lambda name: f"from {name[1].replace('/', '.')} import *\n", file) or code for file, code in found
    ]


_COPY = r"<!-- (\S+\.py) -->\n\n"
"""A comment that says which file the block below is a copy of: GitHub shows pages as they are, and includes nothing."""


def test_a_copy_of_a_file_in_a_page_is_the_file() -> None:
    copies = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "--8<--" not in text
        for file, code in re.findall(rf"^{_COPY}``` \{{\.python\}}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            assert code == (ROOT / file).read_text(encoding="utf-8"), f"{page.name} has an older {file}"
            copies += 1
    assert copies == 10


def run(page: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, blocks: int | None = None) -> None:
    """Run the first blocks of a page, or all, in order, in a module that has `names` and gets theirs."""
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    module.__dict__.update(names)
    for block in blocks_of(page)[:blocks]:
        exec(compile(block, f"{page.name}, {block.splitlines()[0]!r}", "exec", dont_inherit=True), module.__dict__)
    names.update(module.__dict__)


@cache
def quickstart_names() -> dict[str, Any]:
    """Return what pages take from the first block of the quickstart."""
    with pytest.MonkeyPatch.context() as patch:
        names: dict[str, Any] = {}
        run(DOCS / "quickstart.md", names, patch, blocks=1)
    return {name: names[name] for name in ("torch", "qfx", "model", "batches", "qmodel")}


def language_model() -> dict[str, Any]:
    """Return the names that pages about language models expect: a model, its tokenizer, a text, and prompts."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=320, max_position_embeddings=64)
    prompt = {"input_ids": torch.randint(1, 320, (2, 8))}
    text = {"text": "Once upon a time", "tokenizer": byte_pairs()}
    return {"llm": LlamaForCausalLM(config).eval(), "token_batches": [prompt], "prompt": prompt, **text}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text("utf-8")], ids=lambda p: p.name
)
def test_every_python_block_runs_after_the_ones_before_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in RUN_ELSEWHERE:
        assert f'"{page.name}"' in (ROOT / RUN_ELSEWHERE[page.name]).read_text()
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    names = {} if page.name in ("README.md", "quickstart.md") else dict(quickstart_names())
    if page.name in ("checkpoints.md", "generation.md", "serving.md"):
        names |= language_model()
        read_checkpoints_here(monkeypatch)
    run(page, names, monkeypatch)
    if page.name in ("README.md", "quickstart.md"):
        assert (tmp_path / "model.onnx").is_file()


def test_what_extensions_import_is_in_the_api_page() -> None:
    """The page says that everything it does not list may change."""
    listed: list[Any] = []
    for path in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE):
        value = pydoc.locate(path)
        assert value is not None, path
        names = getattr(value, "__all__", None) or [name for name in vars(value) if not name.startswith("_")]
        listed += [getattr(value, name) for name in names] if inspect.ismodule(value) else [value]
    sources = [*(ROOT / "tests" / "extensions").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    texts = [file.read_text("utf-8") for file in sources]
    texts += [code for page in ("extend.md", "configuration.md") for code in blocks_of(DOCS / page)]
    missing = set()
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("quark_fx."):
            for alias in node.names:
                if not any(getattr(import_module(node.module), alias.name) is value for value in listed):
                    missing.add(f"{node.module}.{alias.name}")
    assert not missing


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    pages = {*PAGES, *ROOT.glob("*.md"), *RESULTS.glob("*.md")}
    headings = {
        page: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}
        for page, text in ((page, page.read_text("utf-8")) for page in pages)
    }
    broken = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            target = (page.parent / link).resolve() if link else page
            if not target.exists() or (heading and heading not in headings[target]):
                broken.append(f"{page.name}: {link}#{heading}")
    assert not broken


def test_every_preset_has_its_row() -> None:
    presets = (DOCS / "presets.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `([a-z0-9_]+)` \|", presets, re.MULTILINE)) == sorted(PRESETS)


def rows(page: Path) -> list[list[str]]:
    """Return the cells of all tables of a page."""
    lines = re.findall(r"^\| (.*) \|$", page.read_text("utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_figures_of_the_presets_are_those_that_were_measured() -> None:
    cosines = {row[0]: row[-1].split(" / ")[-1] for row in rows(RESULTS / "trained.md")}
    (minilm,) = re.findall(
        r"^## minilm\n(.*?)^## ", (RESULTS / "format_matrix.md").read_text("utf-8"), re.M | re.DOTALL
    )
    sizes = dict(re.findall(r"^\| (\w+) +\|.*\| +([\d.]+) \|[^|]*\|$", minilm, re.MULTILINE))
    shown = [row for row in rows(DOCS / "presets.md") if len(row) == 6 and row[0].startswith("`")]
    assert len(shown) > 8
    for name, *_, size, cosine in shown:
        assert cosine == cosines[name.strip("`")]
        assert size == sizes.get(name.strip("`"), "–")


def test_every_figure_of_the_comparison_is_on_the_page_it_links() -> None:
    (section,) = re.findall(r"^## Next to other tools\n(.*?)^## ", PAGES[0].read_text("utf-8"), re.M | re.DOTALL)
    compared = [line for line in section.splitlines() if "](benchmarks/results/" in line and re.search(r"\d\.\d", line)]
    assert len(compared) >= 5
    results = (DOCS / "results.md").read_text("utf-8").replace("(../", "(")
    concluded = re.findall(r"^\| .*\d.* \| \[.*\]\(.*\) \|$", results, re.MULTILINE)
    assert len(concluded) >= 19
    paragraphs = [" ".join(text.split("\n")) for text in section.split("\n\n") if text.startswith("AMD Quark's AWQ")]
    assert paragraphs
    for line in compared + concluded + paragraphs:
        for page in re.findall(r"\]\((benchmarks/results/\w+\.md)\)", line)[:1]:
            measured = set(re.findall(r"\d+\.\d+", (ROOT / page).read_text("utf-8")))
            assert set(re.findall(r"\d+\.\d+", line)) <= measured, line


def test_the_results_list_every_page_that_a_benchmark_writes_with_its_command() -> None:
    listed = dict(
        re.findall(
            r"^\| \[.*?\]\((?:\.\./benchmarks/results/)?(\w+\.md)\) .* `python -m benchmarks\.(\w+)` \|$",
            (DOCS / "results.md").read_text("utf-8"),
            re.MULTILINE,
        )
    )
    benchmarks = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert set(listed.values()) <= benchmarks
    pages = {page.name: page for page in RESULTS.glob("*.md")}
    written = {n for n, page in pages.items() if f"`python -m benchmarks.{page.stem}" in page.read_text("utf-8")}
    assert len(written) > 15
    assert written <= set(listed)


ALGORITHMS = dict(
    re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "algorithms.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_of_an_algorithm_exist_and_their_defaults_are_those_shown(name: str) -> None:
    parameters = inspect.signature(NAMES[name]).parameters
    shown = re.findall(r"^\| (`.*?) \|", ALGORITHMS[name], re.MULTILINE)
    for option, value in re.findall(r"`(\w+)=(.*?)`", " ".join(shown)):
        assert parameters[option].default == ast.literal_eval(value), option
    assert "Source:" in ALGORITHMS[name]


def test_the_shared_options_of_learning_passes_are_listed_with_their_defaults() -> None:
    table = [row for row in rows(DOCS / "algorithms.md") if len(row) == 6]
    header, *body = [[cell.strip("`") for cell in row] for row in table]
    assert [option for option, *_ in body] == [field.name for field in fields(Schedule) if field.name != "only"]
    for option, _, *defaults in body:
        for name, default in zip(header[2:], defaults, strict=True):
            shown, parameters = ast.literal_eval(default), inspect.signature(NAMES[name]).parameters
            assert parameters[option].default == shown, f"{name}({option}=)"


def test_the_reference_has_every_public_name() -> None:
    reference = (DOCS / "api.md").read_text("utf-8")
    named = set(re.findall(r"^::: quark_fx\.(\w+)$", reference, re.MULTILINE))
    values = {"INHERIT", "block_formats", "formats", "gguf_types", "ops", "presets", "targets"}
    assert named | values == set(qfx.__all__)


def test_the_site_has_every_page_in_its_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = re.findall(r"[\w]+\.md", str(navigation))
    assert len(listed) == len(set(listed))
    others = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}  # `docs/site_pages.py` adds these
    assert set(listed) == {page.name for page in DOCS.glob("*.md")} | others


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
