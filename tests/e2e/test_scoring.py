"""embed, classify, score and rerank of text, in Python and on the command line, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from inflight import LLM
from inflight.cli.main import app
from inflight.errors import PromptError, RequestError
from tests.support.checkpoints import write_tokenizer
from tests.support.encoder_checkpoints import LONGEST, make_encoder, write_pooling

QUERY = "why does it rain?"
DOCUMENTS = ["clouds cool and drops fall", "the engine steps", "", "A batch of 12 requests, numbers and all."]


def write(folder: Path, model: Any) -> PreTrainedTokenizerFast:
    """A checkpoint with a tokenizer that frames texts as BERT's does; transformers' own over the same file."""
    model.save_pretrained(folder)
    file = write_tokenizer(folder) / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    made.post_processor = processors.BertProcessing(("<|user|>", 2), ("<|system|>", 1))
    made.save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, list[list[float]]]]:
    """One whose files say: the mean of all tokens, of length 1, and two prompts. And what it is to give."""
    folder = tmp_path_factory.mktemp("embedder")
    model = make_encoder("bert", classifier=False)
    tokenizer = write(folder, model)
    write_pooling(folder)
    prompts = {"query": "query: ", "document": ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    with torch.inference_mode():
        states = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in [f"query: {QUERY}", *DOCUMENTS]
        ]
    with LLM(folder) as llm:
        yield llm, torch.nn.functional.normalize(torch.stack(states)).tolist()


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path, list[float]]]:
    """One with a single label, and the logits of all pairs."""
    folder = tmp_path_factory.mktemp("cross-encoder")
    model = make_encoder("bert", classifier=True, num_labels=1)
    tokenizer = write(folder, model)
    with torch.inference_mode():
        more = {"return_tensors": "pt", "return_token_type_ids": True}
        pairs = [tokenizer([QUERY], [document], **more) for document in DOCUMENTS]
        logits = [model(**pair).logits.item() for pair in pairs]
    with LLM(folder) as llm:
        yield llm, folder, logits


def near(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


def test_embeddings_match_the_reference(embedder: tuple[LLM, list[list[float]]]) -> None:
    llm, expected = embedder
    outputs = llm.embed(DOCUMENTS)
    near([output.outputs.embedding for output in outputs], expected[1:])
    assert all(type(number) is float for number in outputs[0].outputs.embedding)
    assert outputs[0].outputs.vector.dtype == np.float32
    near(llm.embed(QUERY, prompt_name="query")[0].outputs.vector, expected[0])
    near(llm.embed(outputs[0].prompt_token_ids)[0].outputs.vector, expected[1])
    assert llm.embed([]) == []


def test_scores_of_an_embedder_are_cosines(embedder: tuple[LLM, list[list[float]]]) -> None:
    llm, expected = embedder
    query, *documents = np.array(expected)
    outputs = llm.score(QUERY, DOCUMENTS)
    near([output.outputs.score for output in outputs], documents @ query)
    assert {output.outputs.scale for output in outputs} == {"cosine"}
    own = [output.prompt_token_ids for output in llm.embed(DOCUMENTS)]
    query_ids = llm.embed(QUERY, prompt_name="query")[0].prompt_token_ids
    assert [output.prompt_token_ids for output in outputs] == [[*query_ids, *ids] for ids in own]
    with pytest.raises(RequestError, match="cannot classify: it can embed, score, rerank"):
        llm.classify("text")
    with pytest.raises(RequestError, match="cannot generate: it can embed, score, rerank"):
        llm.generate("text")


def test_cross_encoder_scores_each_document(cross_encoder: tuple[LLM, Path, list[float]]) -> None:
    llm, _, logits = cross_encoder
    outputs = llm.score(QUERY, DOCUMENTS)
    near([output.outputs.score for output in outputs], torch.sigmoid(torch.tensor(logits)))
    assert outputs[0].outputs.scale == "sigmoid"
    near([output.outputs.score for output in llm.score(QUERY, DOCUMENTS, scale="logit")], logits)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    labelled = llm.classify(pairs, scale="logit")
    near([output.outputs.probs for output in labelled], [[logit] for logit in logits])
    assert labelled[0].outputs.label == "LABEL_0"


def test_rerank_returns_the_best_first(cross_encoder: tuple[LLM, Path, list[float]]) -> None:
    llm, _, logits = cross_encoder
    order = sorted(range(len(logits)), key=lambda index: -logits[index])
    ranking = llm.rerank(QUERY, DOCUMENTS, top_n=3)
    assert [item.index for item in ranking] == order[:3]
    assert [item.document for item in ranking] == [DOCUMENTS[index] for index in order[:3]]
    same = llm.rerank(QUERY, ["equal"] * 5)
    assert [item.index for item in same] == [0, 1, 2, 3, 4]


def test_rejected_text_rejects_the_call(cross_encoder: tuple[LLM, Path, list[float]]) -> None:
    llm, _, _ = cross_encoder
    before = llm.stats().num_prompt_tokens
    with pytest.raises(PromptError, match="document 1 has 600 tokens"):
        llm.rerank(QUERY, ["fine", "\x01\x02" * 300])
    assert llm.stats().num_prompt_tokens == before
    (cut,) = llm.score(QUERY, ["\x01\x02" * 300], truncate=True)
    assert len(cut.prompt_token_ids) == LONGEST
    (shorter,) = llm.score(QUERY, ["\x01\x02" * 300], max_tokens_per_doc=7)
    assert len(shorter.prompt_token_ids) == len(llm.score(QUERY, "")[0].prompt_token_ids) + 7


# ---- the command line ----


def run(*arguments: object, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_rerank_reads_files_and_lines(cross_encoder: tuple[LLM, Path, list[float]], tmp_path: Path) -> None:
    _, folder, logits = cross_encoder
    files = [tmp_path / f"{index}.txt" for index in range(len(DOCUMENTS))]
    for file, document in zip(files, DOCUMENTS, strict=True):
        file.write_text(document)
    order = sorted(range(len(logits)), key=lambda index: -logits[index])
    ranking = json.loads(run("rerank", QUERY, *files, "--model", folder, "--json"))
    assert (ranking["query"], ranking["scale"]) == (QUERY, "sigmoid")
    assert [item["name"] for item in ranking["results"]] == [str(files[index]) for index in order]
    lines = run(
        "rerank", QUERY, "-", "--model", folder, "--top-n", 2, stdin="\n".join(DOCUMENTS)
    ).splitlines()
    best = [index for index in order if DOCUMENTS[index]][:2]
    assert lines[0].split() == ["rank", "score", "(sigmoid)", "document", "begins"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert [line.split()[2] for line in lines[1:3]] == [f"-:{index + 1}" for index in best]
    with pytest.raises(PromptError, match="cannot be read"):
        run("rerank", QUERY, tmp_path / "nosuch", "--model", folder)


def test_embed_prints_a_line_for_each_text(embedder: tuple[LLM, list[list[float]]]) -> None:
    llm, expected = embedder
    folder = llm.get_tokenizer().folder
    lines = run("embed", "-", "--model", folder, stdin="\n".join(DOCUMENTS)).splitlines()
    items = [json.loads(line) for line in lines]
    assert [item["text"] for item in items] == [document for document in DOCUMENTS if document]
    near(items[0]["embedding"], expected[1])
    assert json.loads(run("embed", DOCUMENTS[1], "--model", folder))["num_tokens"] > 2
