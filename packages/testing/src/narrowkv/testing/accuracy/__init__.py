"""What a cache recipe costs a language model: perplexity, KL, retrieval, measured through transformers.

`narrowkv accuracy` is this on the command line. Needs the extra `transformers`, and `accuracy` for models in
GGUF files.
"""

from narrowkv.testing.accuracy.evaluate import Score, measure
from narrowkv.testing.accuracy.models import LanguageModel, load_model
from narrowkv.testing.accuracy.recipes import RECIPES, Recipe, StoredSide, find_recipes
from narrowkv.testing.accuracy.tiny_lm import TinySizes, train_tiny

__all__ = [
    "RECIPES",
    "LanguageModel",
    "Recipe",
    "Score",
    "StoredSide",
    "TinySizes",
    "find_recipes",
    "load_model",
    "measure",
    "train_tiny",
]
