"""A small GPT: a transformer that reads characters from left to right and predicts the next one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Causal attention, then two linear maps, each with a residual connection.

    Args:
        width: size of each character's vector.
        heads: number of attention heads; divides `width`.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.maps = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, block, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).view(batch, block, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)
        x = x + F.dropout(self.attended(seen.transpose(1, 2).reshape(batch, block, width)), dropout)
        return x + self.maps(x)


class GPT(nn.Module):
    """The whole model.

    Args:
        characters: size of the vocabulary.
        block: length of the longest text that it reads at once.
    """

    def __init__(
        self, *, characters: int, block: int, layers: int, width: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.block = block
        self.character = nn.Embedding(characters, width)
        self.position = nn.Embedding(block, width)
        self.layers = nn.Sequential(*[Layer(width, heads, dropout) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        self.next_character = nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        # Input and output share one embedding.
        self.next_character.weight = self.character.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of each next character: from (batch, block) to (batch, block, characters)."""
        x = self.character(text) + self.position.weight[: text.shape[1]]
        scores: torch.Tensor = self.next_character(self.last(self.layers(x)))
        return scores

    @torch.no_grad()
    def write(self, text: torch.Tensor, characters: int, temperature: float = 0.8) -> torch.Tensor:
        """Continue a text.

        Args:
            text: (block,) numbers of characters, at least one.
            characters: how many to add.
        """
        for _ in range(characters):
            scores = self(text[-self.block :][None])[0, -1].float() / temperature
            text = torch.cat([text, torch.multinomial(scores.softmax(0), 1)])
        return text
