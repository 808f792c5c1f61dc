"""Where a recipe's model is from: built in, a folder, a GGUF file, or the hub."""

from __future__ import annotations

import os.path

from appliance.gguf.source import is_gguf
from appliance.recipe.schema import Recipe
from appliance.recipe.text import full_path


def hub_name(recipe: Recipe) -> str:
    """Return the name of the recipe's model on the hub, empty where it is a folder, a file or built in."""
    source = recipe.model.path or ""
    return source if source and not is_folder(source) else ""


def is_folder(source: str) -> bool:
    """Return whether `model.path` means a folder or a GGUF file: it exists, or cannot be a hub name (`owner/name`)."""
    is_path = is_gguf(str(full_path(source))) or source.startswith(("/", ".", "~")) or source.count("/") > 1
    return is_path or os.path.isdir(full_path(source))
