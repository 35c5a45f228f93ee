"""A compact BERT, for training only.

Parameter names and arithmetic are those of transformers' `BertModel` and `BertForSequenceClassification`, so an export
is a cast and a save.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class BertShape:
    """The sizes, under the names of a Hugging Face config.json."""

    num_hidden_layers: int
    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 384
    num_attention_heads: int = 4
    max_position_embeddings: int = 256
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


CROSS_ENCODER = BertShape(num_hidden_layers=6)
EMBEDDER = BertShape(num_hidden_layers=4)
DIMENSIONS = (128, 64, 32)  # of the embedder's vectors: the whole and its beginnings should all be good


def _norm(shape: BertShape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)


class Embeddings(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(shape.type_vocab_size, shape.hidden_size)
        self.LayerNorm = _norm(shape)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        whole = self.word_embeddings(ids) + self.token_type_embeddings(types)
        out: Tensor = self.LayerNorm(whole + self.position_embeddings.weight[: ids.shape[1]])
        return out


class SelfAttention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.key = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.value = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [batch, heads, length, head_dim]
        return out.transpose(1, 2).flatten(2)


class Output(nn.Module):
    """What a sublayer adds to its input, normed."""

    def __init__(self, size: int, shape: BertShape, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(size, shape.hidden_size)
        self.LayerNorm = _norm(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class BertLayer(nn.Module):
    def __init__(self, shape: BertShape, dropout: float) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(shape), "output": Output(shape.hidden_size, shape, dropout)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(shape.hidden_size, shape.intermediate_size)})
        self.output = Output(shape.intermediate_size, shape, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        out: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return out


class Layers(nn.Module):
    def __init__(self, shape: BertShape, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(shape, dropout) for _ in range(shape.num_hidden_layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Bert(nn.Module):
    """Token ids and type ids [batch, length], mask [batch, length] of true tokens -> states [batch, length, hidden]."""

    def __init__(self, shape: BertShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.encoder = Layers(shape, dropout)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(shape.hidden_size, shape.hidden_size)})
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Wider than BERT's 0.02: a small model that is trained for a minute should not begin nearly linear.
                nn.init.normal_(module.weight, std=0.05)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embeddings(ids, types), mask[:, None, None, :])
        return out


class CrossEncoder(nn.Module):
    """Query and text as one sequence -> one score [batch], a logit."""

    def __init__(self, shape: BertShape = CROSS_ENCODER, dropout: float = 0.0) -> None:
        super().__init__()
        self.bert = Bert(shape, dropout)
        self.classifier = nn.Linear(shape.hidden_size, 1)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        first = self.bert(ids, types, mask)[:, 0]
        score: Tensor = self.classifier(torch.tanh(self.bert.pooler["dense"](first)))
        return score[:, 0]


class Embedder(nn.Module):
    """A text -> a vector [batch, hidden] of length one: the mean over its tokens."""

    def __init__(self, shape: BertShape = EMBEDDER, dropout: float = 0.0) -> None:
        super().__init__()
        self.bert = Bert(shape, dropout)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(ids, types, mask).float()
        counted = mask[..., None].float()
        return F.normalize((states * counted).sum(1) / counted.sum(1), dim=-1)
