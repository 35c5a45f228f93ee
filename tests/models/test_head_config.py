"""Reading the files of sentence-transformers, and rejecting invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ModelError
from inflight.models.head_config import (
    SentenceFiles,
    classifier_facts,
    embedding_facts,
    read_labels,
    read_sentence_files,
)
from inflight.models.heads import DenseLayer, NormLayer


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]


MEAN = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
DENSE = {
    "in_features": 32,
    "out_features": 16,
    "bias": False,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def test_folder_without_modules_has_no_sentence_files(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) is None


def test_all_sentence_files_are_read(tmp_path: Path) -> None:
    listed = modules("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
    listed[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    write(
        tmp_path,
        {
            "modules.json": listed,
            "1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": ["max", "cls"]},
            "2_Dense/config.json": DENSE,
            "3_LayerNorm/config.json": {"dimension": 16},
            "sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "document": ""},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
            },
        },
    )
    assert read_sentence_files(tmp_path) == SentenceFiles(
        pooling=("max", "cls"),
        width=16,
        head=(DenseLayer("2_Dense/linear", 32, 16, False, "tanh"), NormLayer("3_LayerNorm/norm", 16, 1e-5)),
        normalize=True,
        max_length=77,
        lowercase=True,
        prompts={"query": "query: ", "document": ""},
        default_prompt="query",
        similarity="dot",
    )


def test_older_flags_are_joined_in_their_own_order(tmp_path: Path) -> None:
    config = MEAN | {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    write(tmp_path, {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": config})
    files = read_sentence_files(tmp_path)
    assert files is not None
    assert files.pooling == ("cls", "mean", "lasttoken")
    assert not files.normalize


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": "{}"}, "holds a dict: it must be a JSON list"),
        ({"modules.json": "null"}, "holds a NoneType"),
        ({"modules.json": []}, "lists nothing: it must begin with a Transformer"),
        ({"modules.json": [3]}, "has the entry 3: it must be an object"),
        ({"modules.json": modules("Transformer", "CNN")}, "models.CNN': supported modules are"),
        ({"modules.json": [{"type": "os.system", "path": ""}]}, "'os.system': supported modules are"),
        ({"modules.json": modules("Transformer", *["Dense"] * 40)}, "at most 16 modules"),
        ({"modules.json": modules("Transformer", "Normalize", "Pooling")}, "Normalize as module 1"),
        (
            {"modules.json": modules("Transformer", "Pooling")},
            "named in modules.json but is missing",
        ),
        (
            {
                "modules.json": [
                    modules("Transformer")[0],
                    modules("", "Pooling")[1] | {"path": "../elsewhere"},
                ]
            },
            "path in an entry of modules.json is '../elsewhere': it must be the name of a folder",
        ),
        (
            {"modules.json": [modules("Transformer")[0], modules("", "Pooling")[1] | {"path": ""}]},
            "path in an entry of modules.json is '': it must be the name of a folder",
        ),
        ({"1_Pooling/config.json": {"word_embedding_dimension": 32}}, "has no pooling mode"),
        ({"1_Pooling/config.json": MEAN | {"pooling_mode": "attention"}}, "it must be some of cls, max"),
        ({"1_Pooling/config.json": MEAN | {"include_prompt": False}}, "without the prompt"),
        ({"1_Pooling/config.json": MEAN | {"word_embedding_dimension": 1 << 40}}, "an integer from 1 to"),
        ({"2_Dense/config.json": DENSE | {"activation_function": "os.system"}}, "torch.nn's Identity, Tanh"),
        (
            {"2_Dense/config.json": DENSE | {"use_residual": True}},
            "use_residual in 2_Dense/config.json is True",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": -1}}, "max_seq_length"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 3}}}, "prompts in config_sentence"),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            "default_prompt_name in config_sentence_transformers.json is 'query': it must be one of no prompts",
        ),
    ],
)
def test_invalid_files_are_rejected_in_one_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    usual = {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
        "2_Dense/config.json": DENSE,
    }
    if "missing" not in message:
        usual["1_Pooling/config.json"] = MEAN
    write(tmp_path, usual | files)
    with pytest.raises(ModelError) as caught:
        read_sentence_files(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modules_after_normalize_are_rejected(tmp_path: Path) -> None:
    listed = modules("Transformer", "Pooling", "Normalize", "Dense")
    write(tmp_path, {"modules.json": listed, "1_Pooling/config.json": MEAN})
    with pytest.raises(ModelError, match="has Dense after Normalize"):
        read_sentence_files(tmp_path)


# ---- facts about the head ----


@pytest.mark.parametrize(
    ("files", "scores"),
    [
        (SentenceFiles(), "cosine"),
        (SentenceFiles(similarity="dot", normalize=True), "cosine"),
        (SentenceFiles(similarity="dot"), None),
        (SentenceFiles(similarity="euclidean", normalize=True), None),
    ],
)
def test_embeddings_score_pairs_if_the_checkpoint_compares_by_cosine(
    files: SentenceFiles, scores: str | None
) -> None:
    facts = embedding_facts(files, {"matryoshka_dimensions": [8, 4, 8]}, 16, splittable=False)
    assert (facts.scores, facts.dimensions, facts.size) == (scores, (4, 8), 16)
    with pytest.raises(ModelError, match="a list of sizes up to 16"):
        embedding_facts(files, {"matryoshka_dimensions": [32]}, 16, splittable=False)


ONE, THREE = {"id2label": {"0": "relevant"}}, {"id2label": {"1": "b", "0": "a", "2": "c"}}
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (ONE, "sigmoid"),
        (THREE, "softmax"),
        (THREE | {"problem_type": "multi_label_classification"}, "sigmoid"),
        (ONE | {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0.0"}}, "logit"),
        (ONE | {"sentence_transformers": {"version": "5.0.0"}}, "sigmoid"),
        (ONE | {"sbert_ce_default_activation_function": IDENTITY}, "logit"),
        (THREE | {"sbert_ce_default_activation_function": SIGMOID}, "sigmoid"),
    ],
)
def test_scale_of_a_classifier_follows_its_config(config: dict[str, Any], scale: str) -> None:
    facts = classifier_facts(config, None, splittable=False)
    assert facts.scale == scale
    assert facts.scores == ("pair" if facts.size == 1 else None)
    assert facts.labels == (("relevant",) if facts.size == 1 else ("a", "b", "c"))


def test_newest_activation_field_takes_precedence() -> None:
    config = ONE | {"sbert_ce_default_activation_function": SIGMOID}
    assert classifier_facts(config, SentenceFiles(activation=IDENTITY), splittable=False).scale == "logit"
    with pytest.raises(ModelError, match="nn's Identity, Sigmoid, Softmax"):
        classifier_facts(ONE | {"sbert_ce_default_activation_function": "os.system"}, None, splittable=False)


def test_labels_come_from_the_config() -> None:
    assert read_labels({}) == ("LABEL_0", "LABEL_1")
    with pytest.raises(ModelError, match="it must be at most 65536"):
        read_labels({"num_labels": 1 << 20})
    for odd in ({}, {"1": "b"}, {"0": 3}, {"x": "a"}):
        with pytest.raises(ModelError, match="it must name 1 to"):
            read_labels({"id2label": odd})
