"""GGUF files as checkpoints: opened by path or from a hub repository, fingerprinted, served, and rejected."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gguf
import pytest

from inflight import LLM, SamplingParams
from inflight.checkpoint.builtin import checkpoint_folder
from inflight.checkpoint.checkpoint import fingerprint, fingerprint_now, open_checkpoint
from inflight.config import EngineConfig, ModelConfig
from inflight.errors import InflightError, ModelError, UnknownArchitectureError, WeightsError
from inflight.loading.load import load_engine
from inflight.loading.planning import Devices, plan_devices
from inflight.models.decoders.families import decoder_spec
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.gguf_checkpoints import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", eos_token_id=0)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    return write_gguf(folder / "model.gguf", folder, metadata=sampling)


def test_config_is_that_of_the_folder(folder: Path, model: Path) -> None:
    ours, theirs = open_checkpoint(str(model)), open_checkpoint(str(folder))
    assert ours.folder is None
    assert ours.weight_files == (model,)
    assert ours.generation_config == {
        "eos_token_id": [0],
        "temperature": pytest.approx(0.6),
        "top_k": 20,
    }
    spec, expected = decoder_spec(ours.config), decoder_spec(theirs.config)
    for field in ("vocab_size", "mlps", "mixers", "hidden_size", "default_context"):
        assert getattr(spec, field) == getattr(expected, field)
    assert spec.norm_eps == pytest.approx(expected.norm_eps)


def test_gguf_file_answers_like_its_folder(folder: Path, model: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = []
    for path in (folder, model):
        llm = LLM(str(path), num_blocks=64, max_model_len=128)
        texts = [output.outputs[0].text for output in llm.generate(["The quick", "When 12 trees"], params)]
        chat = llm.chat([{"role": "user", "content": "Hello <|end|>"}], params)
        answers.append((texts, chat[0].prompt_token_ids, chat[0].outputs[0].token_ids))
    assert answers[0] == answers[1]


def test_quantized_file_answers(tmp_path: Path) -> None:
    """The built-in model, whose answers survive 8 bits."""
    built_in = checkpoint_folder()
    path = write_gguf(tmp_path / "q8.gguf", built_in, lambda _name, _tensor: "Q8_0", pre="starcoder")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    answers = [
        LLM(str(source), num_blocks=64, max_model_len=256).chat(question, params)[0].outputs[0].text
        for source in (built_in, path)
    ]
    assert answers[0] == answers[1]


def test_plan_of_a_gguf_file_counts_its_parameters(folder: Path, model: Path) -> None:
    devices = Devices("cpu", 1, 1 << 34)
    plans = [
        plan_devices(EngineConfig(model=ModelConfig(model=str(path))), devices) for path in (folder, model)
    ]
    assert plans[0].parameters == plans[1].parameters
    assert plans[1].fits[0].num_tokens > 0


# ---- where files come from ----


def test_gguf_file_of_a_hub_repository_is_downloaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def download(repository: str, **kwargs: Any) -> str:
        calls.append({"repository": repository, **kwargs})
        return str(model.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    opened = open_checkpoint("owner/name-GGUF:model.gguf", revision="v2", download_dir="here")
    assert opened.tokenizer_path == model
    assert (calls[0]["repository"], calls[0]["revision"], calls[0]["cache_dir"]) == (
        "owner/name-GGUF",
        "v2",
        "here",
    )
    assert calls[0]["allow_patterns"] == ["model.gguf"]
    with pytest.raises(InflightError):  # the file does not exist, but its name was requested
        open_checkpoint("owner/name:sub/big-00001-of-00003.gguf")
    (pattern,) = calls[1]["allow_patterns"]
    assert fnmatch("sub/big-00003-of-00003.gguf", pattern)
    with pytest.raises(ModelError, match="must be inside the repository"):
        open_checkpoint("owner/name:../other.gguf")


def test_paths_that_name_no_model_are_explained(tmp_path: Path, model: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(model, tmp_path / "one.gguf")
    with pytest.raises(WeightsError, match=r"it has one\.gguf: pass the path of a GGUF file"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist: pass a checkpoint folder, a GGUF file or a hub id"):
        open_checkpoint(str(tmp_path / "missing.gguf"))


def test_split_model_is_one_checkpoint(tmp_path: Path, model: Path) -> None:
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(tmp_path / "big", "llama", split_max_tensors=10)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = min(tmp_path.glob("big-00001-*.gguf"))
    opened = open_checkpoint(str(first))
    assert len(opened.weight_files) > 1
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    answers = [
        LLM(str(path), num_blocks=64, max_model_len=128).generate("A batch", params)[0].outputs[0].token_ids
        for path in (model, first)
    ]
    assert answers[0] == answers[1]


# ---- fingerprints ----


def test_fingerprint_follows_weights_tokenizer_and_metadata(
    folder: Path, model: Path, tmp_path: Path
) -> None:
    def known_as(path: Path) -> str:
        return fingerprint(open_checkpoint(str(path)))

    copy = tmp_path / "model.gguf"
    shutil.copy(model, copy)
    assert known_as(copy) == known_as(model)
    assert fingerprint_now(ModelConfig(model=str(model))) == known_as(model)
    content = bytearray(copy.read_bytes())
    tensor = open_checkpoint(str(copy)).gguf.tensors["blk.1.ffn_up.weight"]  # type: ignore[union-attr]
    content[tensor.offset + tensor.num_bytes // 2] ^= 1
    copy.write_bytes(content)
    assert known_as(copy) != known_as(model)
    template = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "tokenizer.chat_template": "other",
    }
    assert known_as(write_gguf(tmp_path / "other.gguf", folder, metadata=template)) != known_as(model)


# ---- rejection ----


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (
            {"general.architecture": "mamba"},
            UnknownArchitectureError,
            "architecture is 'mamba', supported are llama",
        ),
        (
            {"llama.block_count": 2},
            WeightsError,
            r"blk\.2\..*num_hidden_layers is 2, the weights have 3 layers",
        ),
        ({"llama.block_count": 4_000_000_000}, ModelError, "block_count .* to 16777216"),
        (
            {"llama.block_count": "three"},
            ModelError,
            r"llama\.block_count in .* is 'three': it must be an integer",
        ),
        ({"llama.embedding_length": 128}, WeightsError, "has shape .*requires"),
        ({"llama.attention.head_count": 0}, ModelError, "num_attention_heads"),
        ({"llama.attention.head_count": [4, 4, 4]}, None, ""),
        ({"llama.attention.head_count": [4, 4, 2]}, ModelError, r"head_count in .*: it must be an integer"),
        ({"llama.attention.value_length": 8}, ModelError, "it must be attention.key_length, 16"),
        ({"llama.attention.causal": False}, ModelError, r"llama\.attention\.causal in .* is False"),
        ({"llama.rope.scaling.type": "odd"}, ModelError, "it must be none, linear or yarn"),
        (
            {"llama.rope.freq_base": float("nan")},
            ModelError,
            "freq_base .* is nan: it must be a finite number",
        ),
        ({"llama.rope.dimension_count": 8}, ModelError, "partial_rotary_factor"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, WeightsError, "the weights lack"),
        ({"general.sampling.temp": -3.0}, ModelError, "temperature"),
    ],
)
def test_metadata_that_does_not_fit_is_rejected_in_one_line(
    folder: Path, tmp_path: Path, metadata: dict[str, Any], error: type[ModelError] | None, message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", folder, metadata=metadata)
    config = EngineConfig(model=ModelConfig(model=str(path), max_model_len=64))
    if error is None:
        load_engine(config).close()
        return
    with pytest.raises(error, match=message) as caught:
        load_engine(config)
    assert "\n" not in str(caught.value)


def test_types_of_matrices_may_differ(folder: Path, tmp_path: Path) -> None:
    """As in files of llama.cpp, where each tensor has a type of its own."""
    types = iter(["F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "MXFP4", "Q4_1", "Q5_1"] * 10)
    path = write_gguf(tmp_path / "model.gguf", folder, lambda _name, _tensor: next(types))
    opened = open_checkpoint(str(path))
    assert opened.gguf is not None
    assert {tensor.type.name for tensor in opened.gguf.tensors.values()} >= {"Q4_0", "MXFP4", "F16", "F32"}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    output = LLM(str(path), num_blocks=64, max_model_len=64).generate("A batch", params)[0]
    assert len(output.outputs[0].token_ids) == 4
