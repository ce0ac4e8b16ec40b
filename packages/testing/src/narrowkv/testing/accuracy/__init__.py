"""What a cache recipe costs a language model: perplexity, KL, retrieval, measured through transformers.

`narrowkv accuracy` is this on the command line. Needs the extra `transformers`, and `accuracy` for models in
GGUF files.
"""

from narrowkv.testing.accuracy.evaluate import Score, measure
from narrowkv.testing.accuracy.models import LanguageModel, TinySizes, load_model, train_tiny
from narrowkv.testing.recipes import RECIPES, Recipe, StoredSide, find_recipes

__all__ = [
    "RECIPES", "LanguageModel", "Recipe", "Score", "StoredSide", "TinySizes", "find_recipes",
    "load_model", "measure", "train_tiny",
]  # fmt: skip
